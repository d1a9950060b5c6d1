from typing import TYPE_CHECKING

from nemo_rl.lazy import names_in

if TYPE_CHECKING:
    from nemo_rl.config import DataPlaneConfig as DataPlaneConfig
    from nemo_rl.data_plane.codec import materialize as materialize
    from nemo_rl.data_plane.factory import build_data_plane_client as build_data_plane_client
    from nemo_rl.data_plane.interfaces import DataPlaneClient as DataPlaneClient
    from nemo_rl.data_plane.meta import KVBatchMeta as KVBatchMeta
    from nemo_rl.data_plane.observability import MetricsDataPlaneClient as MetricsDataPlaneClient
    from nemo_rl.data_plane.observability import log_event as log_event

_HOMES = {
    "DataPlaneClient": "nemo_rl.data_plane.interfaces",
    "DataPlaneConfig": "nemo_rl.config",
    "KVBatchMeta": "nemo_rl.data_plane.meta",
    "MetricsDataPlaneClient": "nemo_rl.data_plane.observability",
    "build_data_plane_client": "nemo_rl.data_plane.factory",
    "log_event": "nemo_rl.data_plane.observability",
    "materialize": "nemo_rl.data_plane.codec",
}
__all__ = list(_HOMES)

__getattr__ = names_in(__name__, _HOMES)
