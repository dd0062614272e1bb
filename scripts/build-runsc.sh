#!/bin/sh
# Builds the pinned, static gVisor runtime.
#
#   scripts/build-runsc.sh OUT
#
# The version is the one that runsc/go.mod pins. Nothing is built when OUT was
# built from the same sources by the same Go before; the stamp is OUT.stamp.
set -eu

out=${1:?usage: scripts/build-runsc.sh OUT}
root=$(cd "$(dirname "$0")/.." && pwd)
case $out in /*) ;; *) out=$PWD/$out ;; esac

version=$(sed -n 's|.*gvisor.dev/gvisor \(v[^ ]*\).*|\1|p' "$root/runsc/go.mod")
[ -n "$version" ] || { echo "build-runsc: runsc/go.mod pins no gvisor.dev/gvisor" >&2; exit 1; }

cd "$root/runsc"
stamp="$version $(go env GOVERSION GOOS GOARCH GOAMD64 | tr '\n' ' ')$(cat go.mod go.sum main.go "$root/scripts/build-runsc.sh" | sha256sum | cut -c1-64)"
if [ -f "$out" ] && [ -f "$out.stamp" ] &&
	[ "$(cat "$out.stamp")" = "$stamp $(sha256sum <"$out" | cut -c1-64)" ]; then
	echo "build-runsc: $out is up to date ($version)"
	exit 0
fi

echo "build-runsc: building runsc $version (one to two minutes the first time)"
mkdir -p "$(dirname "$out")"
rm -f "$out.stamp"
# Restore refuses a checkpoint of another version string, so it must be set.
CGO_ENABLED=0 go build -trimpath -buildvcs=false \
	-ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=release-$version" \
	-o "$out.new" .
chmod 0555 "$out.new"
mv -f "$out.new" "$out"
echo "$stamp $(sha256sum <"$out" | cut -c1-64)" >"$out.stamp"
echo "build-runsc: $out ($(wc -c <"$out") bytes)"
