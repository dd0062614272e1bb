package journal

import (
	"crypto/cipher"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"
)

// Kind of an event.
type Kind uint8

// The kinds.
const (
	Started   Kind = 1
	Stdout    Kind = 2
	Stderr    Kind = 3
	Gap       Kind = 4
	Rewound   Kind = 5
	Suspended Kind = 6
	Exit      Kind = 7
	Error     Kind = 8
)

var kindNames = [...]string{Started: "started", Stdout: "stdout", Stderr: "stderr", Gap: "gap",
	Rewound: "rewound", Suspended: "suspended", Exit: "exit", Error: "error"}

// Valid reports whether k is one of the kinds.
func (k Kind) Valid() bool { return k >= Started && k <= Error }

// Output reports whether k is bytes of the process.
func (k Kind) Output() bool { return k == Stdout || k == Stderr }

// Final reports whether nothing follows an event of kind k.
func (k Kind) Final() bool { return k == Exit || k == Error }

// String names the kind as streams do.
func (k Kind) String() string {
	if k.Valid() {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// ID of an event: the epoch and the position after the event.
type ID struct{ Epoch, Offset uint64 }

// String writes "epoch.offset".
func (i ID) String() string {
	return strconv.FormatUint(i.Epoch, 10) + "." + strconv.FormatUint(i.Offset, 10)
}

// ParseID reads what String writes, and nothing else.
func ParseID(s string) (ID, bool) {
	a, b, ok := strings.Cut(s, ".")
	if !ok {
		return ID{}, false
	}
	epoch, ok1 := number(a)
	offset, ok2 := number(b)
	return ID{epoch, offset}, ok1 && ok2
}

// number reads a decimal without sign or leading zero.
func number(s string) (uint64, bool) {
	if len(s) == 0 || len(s) > 20 || len(s) > 1 && s[0] == '0' || s[0] == '+' || s[0] == '-' {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 10, 64)
	return n, err == nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Segment header: magic, epoch, position, guest offset, checksum, padding.
const (
	segmentMagic      = "SPACEJ1\n"
	segmentHeaderSize = 40
	segmentSuffix     = ".seg"
)

func segmentName(pos uint64) string { return fmt.Sprintf("%016x%s", pos, segmentSuffix) }

func parseSegmentName(name string) (uint64, bool) {
	hex, ok := strings.CutSuffix(name, segmentSuffix)
	if !ok || len(hex) != 16 {
		return 0, false
	}
	pos, err := strconv.ParseUint(hex, 16, 64)
	return pos, err == nil && segmentName(pos) == name
}

func appendSegmentHeader(b []byte, epoch, pos, guest uint64) []byte {
	at := len(b)
	b = append(b, segmentMagic...)
	b = binary.BigEndian.AppendUint64(b, epoch)
	b = binary.BigEndian.AppendUint64(b, pos)
	b = binary.BigEndian.AppendUint64(b, guest)
	b = binary.BigEndian.AppendUint32(b, crc32.Checksum(b[at:], castagnoli))
	return append(b, 0, 0, 0, 0)
}

func parseSegmentHeader(b []byte) (epoch, pos, guest uint64, ok bool) {
	if len(b) < segmentHeaderSize || string(b[:8]) != segmentMagic ||
		binary.BigEndian.Uint32(b[32:]) != crc32.Checksum(b[:32], castagnoli) {
		return 0, 0, 0, false
	}
	return binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:]), binary.BigEndian.Uint64(b[24:]), true
}

// Record header: kind, three zero bytes, payload length, nonce round, checksum
// of header and sealed payload, position, end, guest offset, time.
const (
	headerSize = 48
	sealSize   = 16
	crcAt      = 12
	maxRecord  = headerSize + MaxPayload + sealSize
)

type header struct {
	kind            Kind
	length          uint32 // of the payload in clear
	round           uint32
	pos, end, guest uint64
	nanos           int64
}

func (h header) put(b []byte) {
	b[0], b[1], b[2], b[3] = byte(h.kind), 0, 0, 0
	binary.BigEndian.PutUint32(b[4:], h.length)
	binary.BigEndian.PutUint32(b[8:], h.round)
	binary.BigEndian.PutUint32(b[crcAt:], 0)
	binary.BigEndian.PutUint64(b[16:], h.pos)
	binary.BigEndian.PutUint64(b[24:], h.end)
	binary.BigEndian.PutUint64(b[32:], h.guest)
	binary.BigEndian.PutUint64(b[40:], uint64(h.nanos))
}

// parseHeader reads a header strictly; the checksum is checked apart.
func parseHeader(b []byte) (header, bool) {
	h := header{
		kind: Kind(b[0]), length: binary.BigEndian.Uint32(b[4:]), round: binary.BigEndian.Uint32(b[8:]),
		pos: binary.BigEndian.Uint64(b[16:]), end: binary.BigEndian.Uint64(b[24:]), guest: binary.BigEndian.Uint64(b[32:]),
		nanos: int64(binary.BigEndian.Uint64(b[40:])),
	}
	ok := h.kind.Valid() && b[1]|b[2]|b[3] == 0 && h.length <= MaxPayload && h.end > h.pos
	switch {
	case h.kind.Output():
		ok = ok && h.end-h.pos == uint64(h.length)
	case h.kind != Gap:
		ok = ok && h.end-h.pos == 1
	}
	return h, ok
}

// whole reports whether the record b (header and sealed payload) is undamaged.
func whole(b []byte) bool {
	sum := binary.BigEndian.Uint32(b[crcAt:])
	crc := crc32.Update(0, castagnoli, b[:crcAt])
	crc = crc32.Update(crc, castagnoli, []byte{0, 0, 0, 0})
	return sum == crc32.Update(crc, castagnoli, b[crcAt+4:])
}

func (h header) size() int64 { return headerSize + int64(h.length) + sealSize }

// nonce is unique under the session's key: positions never come twice within a
// round, and rounds are random.
func (h header) nonce() [12]byte {
	var n [12]byte
	binary.BigEndian.PutUint32(n[:], h.round)
	binary.BigEndian.PutUint64(n[4:], h.pos)
	return n
}

// seal appends the record of payload to b. The header, checksum zero, is
// authenticated with the payload.
func (h header) seal(b []byte, aead cipher.AEAD, payload []byte) []byte {
	at := len(b)
	var hb [headerSize]byte
	h.put(hb[:])
	nonce := h.nonce()
	b = append(b, hb[:]...)
	b = aead.Seal(b, nonce[:], payload, hb[:])
	binary.BigEndian.PutUint32(b[at+crcAt:], crc32.Checksum(b[at:], castagnoli))
	return b
}

// open decrypts the record in place and returns its payload.
func (h header) open(record []byte, aead cipher.AEAD) ([]byte, bool) {
	var hb [headerSize]byte
	h.put(hb[:])
	nonce := h.nonce()
	body := record[headerSize:]
	out, err := aead.Open(body[:0], nonce[:], body, hb[:])
	return out, err == nil
}
