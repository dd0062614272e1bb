//go:build long

package template

import (
	"bytes"
	"testing"
)

func TestBaseTwiceGivesOneDigestAndOneImage(t *testing.T) {
	needRoot(t)
	var digests []string
	var images [][]byte
	for range 2 {
		s := openStore(t, t.TempDir())
		info := must(t)(s.Build(t.Context(), base(), func(step string) { t.Log(step) }))
		digests = append(digests, info.Digest)
		images = append(images, readAll(t, s.image(hexOf(info.Digest))))
	}
	if digests[0] != digests[1] || !bytes.Equal(images[0], images[1]) {
		t.Errorf("digests %v, images equal: %t", digests, bytes.Equal(images[0], images[1]))
	}
}
