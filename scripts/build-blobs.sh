#!/bin/sh
# Builds the programs that bin/space carries, and packs them where
# internal/blob embeds them. Packs again only what has changed.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
mkdir -p build

"$root/scripts/build-runsc.sh" build/runsc
echo "build-blobs: building space-guest"
CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w" -o build/space-guest ./cmd/space-guest

pack() {
	to=internal/blob/files/$1
	sum=$(sha256sum <"build/$1" | cut -c1-64)
	if [ -f "$to.gz" ] && [ -f "$to.sha256" ] && [ "$(cat "$to.sha256")" = "$sum" ]; then
		return
	fi
	echo "build-blobs: packing $1"
	rm -f "$to.sha256"
	gzip -n -9 -c "build/$1" >"$to.gz.new"
	mv -f "$to.gz.new" "$to.gz"
	echo "$sum" >"$to.sha256"
}
pack runsc
pack space-guest
