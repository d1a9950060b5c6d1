"""What all tests share: hypothesis without a time limit per example, since a busy machine is no failure."""

import hypothesis

hypothesis.settings.register_profile("nemo_rl", deadline=None, print_blob=True)
hypothesis.settings.load_profile("nemo_rl")
