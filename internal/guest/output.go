package guest

import (
	"sort"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/api/guestapi"
)

const (
	readChunk  = 64 << 10
	leastChunk = 512
)

// scratch holds buffers of readChunk bytes: for reading, and as full chunks.
var scratch = sync.Pool{New: func() any { b := make([]byte, readChunk); return &b }}

// output keeps the unacknowledged output of one process: bytes in the order in
// which they were read, and which of them came from which stream. It holds at
// most window bytes.
type output struct {
	mu     sync.Mutex
	window int
	drop   bool

	base, next uint64
	first      uint64   // offset of chunks[0][0]; at most base
	chunks     [][]byte // contiguous
	segs       []segment
	discard    bool // the exit is published: nothing is kept any more
	exit       *guestapi.ExitStatus

	changed chan struct{} // closed at new bytes and at the exit, when someone waits
	space   chan struct{} // closed when the window opens, when someone waits
}

// segment is a run of bytes of one stream, up to offset end.
type segment struct {
	end uint64
	typ guestapi.FrameType
}

func newOutput(window int, drop bool) *output {
	if window <= 0 {
		window = guestapi.DefaultWindow
	}
	return &output{window: min(window, guestapi.MaxWindow), drop: drop}
}

// source is the daemon's end of one of the process's output pipes.
type source struct {
	typ guestapi.FrameType
	// left is, once the process has ended, how many bytes it may still have
	// written; negative before. Guarded by output.mu.
	left int
	eof  bool // guarded by output.mu
}

// maxSegs bounds the memory that a process can claim by switching streams at
// every byte.
func (o *output) maxSegs() int { return 64 + o.window/64 }

// room is how many bytes of typ may be appended now.
func (o *output) room(typ guestapi.FrameType) int {
	if o.drop || o.discard {
		return readChunk
	}
	if n := len(o.segs); n >= o.maxSegs() && o.segs[n-1].typ != typ {
		return 0
	}
	return o.window - int(o.next-o.base)
}

// read moves what one read of the non-blocking fd gives into the buffer, under
// the lock, so that the order of the two streams is the order of the reads.
// full means that nothing was read because the window is full.
func (o *output) read(fd int, s *source) (n int, full bool, err error) {
	buf := scratch.Get().(*[]byte)
	o.mu.Lock()
	defer o.mu.Unlock()
	kept := false
	defer func() {
		if !kept {
			scratch.Put(buf)
		}
	}()
	room := min(o.room(s.typ), readChunk)
	if room <= 0 {
		return 0, true, nil
	}
	for {
		n, err = unix.Read(fd, (*buf)[:room])
		if err != unix.EINTR {
			break
		}
	}
	if n > 0 {
		// A large read becomes a chunk as it is; small ones are gathered.
		if kept = n >= readChunk/2 && !o.discard; kept {
			o.chunks = append(o.chunks, (*buf)[:n])
			o.added(s.typ, n)
		} else {
			o.add(s.typ, (*buf)[:n])
		}
		if s.left > 0 {
			s.left = max(0, s.left-n)
		}
		return n, false, nil
	}
	if err != unix.EAGAIN {
		s.eof = true
	}
	return 0, false, err
}

func (o *output) add(typ guestapi.FrameType, p []byte) {
	if o.discard || len(p) == 0 {
		return
	}
	for rest := p; len(rest) > 0; {
		var tail []byte
		if n := len(o.chunks); n > 0 {
			tail = o.chunks[n-1]
		}
		if len(tail) == cap(tail) {
			size := min(readChunk/4, max(leastChunk, len(rest), 2*cap(tail)))
			tail = make([]byte, 0, size)
			o.chunks = append(o.chunks, tail)
		}
		n := min(len(rest), cap(tail)-len(tail))
		o.chunks[len(o.chunks)-1] = append(tail, rest[:n]...)
		rest = rest[n:]
	}
	o.added(typ, len(p))
}

// added accounts for n bytes of typ that the chunks have got.
func (o *output) added(typ guestapi.FrameType, n int) {
	o.next += uint64(n)
	if n := len(o.segs); n > 0 && o.segs[n-1].typ == typ {
		o.segs[n-1].end = o.next
	} else {
		o.segs = append(o.segs, segment{o.next, typ})
	}
	if o.drop {
		if o.next-o.base > uint64(o.window) {
			o.trim(o.next - uint64(o.window))
		}
		if extra := len(o.segs) - o.maxSegs(); extra > 0 {
			o.trim(o.segs[extra-1].end)
		}
	}
	wake(&o.changed)
}

// trim forgets everything below base.
func (o *output) trim(base uint64) {
	o.base = base
	gone := 0
	for gone < len(o.chunks) && o.first+uint64(len(o.chunks[gone])) <= base {
		o.first += uint64(len(o.chunks[gone]))
		if c := o.chunks[gone]; cap(c) == readChunk {
			c = c[:readChunk]
			scratch.Put(&c)
		}
		gone++
	}
	if gone > 0 {
		rest := copy(o.chunks, o.chunks[gone:])
		clear(o.chunks[rest:])
		o.chunks = o.chunks[:rest]
	}
	i := sort.Search(len(o.segs), func(i int) bool { return o.segs[i].end > base })
	if i > 0 {
		o.segs = append(o.segs[:0], o.segs[i:]...)
	}
	if o.base == o.next {
		o.chunks, o.first = nil, o.next
		o.segs = nil
	}
}

// ack releases output below offset; false when that lies ahead.
func (o *output) ack(offset uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if offset > o.next {
		return false
	}
	if offset > o.base {
		o.trim(offset)
		wake(&o.space)
	}
	return true
}

// publish sets the exit and stops keeping what comes later.
func (o *output) publish(e guestapi.ExitStatus) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.exit = &e
	o.discard = true
	wake(&o.changed)
	wake(&o.space)
}

// look describes what a reader at pos shall do next.
type look struct {
	typ  guestapi.FrameType // 0: nothing yet
	n    int                // bytes copied
	base uint64             // for gap
	exit *guestapi.ExitStatus
	wait <-chan struct{}
}

// at copies output from pos into dst (one stream's run at a time).
func (o *output) at(pos uint64, dst []byte) look {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case pos < o.base:
		return look{typ: guestapi.FrameGap, base: o.base}
	case pos >= o.next && o.exit != nil:
		return look{typ: guestapi.FrameExit, exit: o.exit}
	case pos >= o.next:
		return look{wait: waiter(&o.changed)}
	}
	i := sort.Search(len(o.segs), func(i int) bool { return o.segs[i].end > pos })
	seg := o.segs[i]
	want := int(min(uint64(len(dst)), seg.end-pos))
	n, off := 0, o.first
	for _, c := range o.chunks {
		end := off + uint64(len(c))
		if at := pos + uint64(n); at < end {
			n += copy(dst[n:want], c[at-off:])
			if n == want {
				break
			}
		}
		off = end
	}
	return look{typ: seg.typ, n: n}
}

// spaceWait gives a channel that is closed when the window may have opened for typ.
func (o *output) spaceWait(typ guestapi.FrameType) <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.room(typ) > 0 {
		c := make(chan struct{})
		close(c)
		return c
	}
	return waiter(&o.space)
}

func (o *output) bounds() (base, next uint64, exit *guestapi.ExitStatus) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.base, o.next, o.exit
}

func waiter(c *chan struct{}) <-chan struct{} {
	if *c == nil {
		*c = make(chan struct{})
	}
	return *c
}

func wake(c *chan struct{}) {
	if *c != nil {
		close(*c)
		*c = nil
	}
}
