#!/usr/bin/env bash
# Unpacks the shared libraries that Mooncake needs and this system lacks into a folder, without root (Debian and Ubuntu).
# Usage: mooncake_libs.sh FOLDER. Writes FOLDER/missing.txt with a reason where that is impossible, and succeeds anyway: `make test` says what did not run.
set -uo pipefail
folder="$(mkdir -p "$1" && cd "$1" && pwd)" # absolute: the work below happens elsewhere
rm -f "$folder/missing.txt"
lacking=()
for pair in libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnuma.so.1:libnuma1 libnl-3.so.200:libnl-3-200 libnl-route-3.so.200:libnl-route-3-200; do
  library="${pair%%:*}"
  /sbin/ldconfig -p 2>/dev/null | grep -q "$library" || [ -e "$folder/$library" ] || lacking+=("${pair##*:}")
done
[ ${#lacking[@]} -eq 0 ] && exit 0
fail() { echo "$1" > "$folder/missing.txt"; exit 0; }
command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || fail "Mooncake needs ${lacking[*]}; this system has no apt-get to fetch them with"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
# Lists and cache of our own: reading the system's needs no root, refreshing them does.
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
own=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root -o Debug::NoLocking=1 -o Acquire::Retries=3)
cd "$work" || fail "no temporary folder"
if ! apt-get -qq -o APT::Sandbox::User=root download "${lacking[@]}" > log 2>&1; then
  apt-get -qq "${own[@]}" update >> log 2>&1
  apt-get -qq "${own[@]}" download "${lacking[@]}" >> log 2>&1 || fail "Mooncake needs ${lacking[*]}; apt-get could not fetch them: $(tail -n 1 log)"
fi
for package in ./*.deb; do dpkg-deb -x "$package" root || fail "$package could not be unpacked"; done
find root -name '*.so.*' -exec cp -P -t "$folder" {} +
