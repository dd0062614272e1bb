package session

import "time"

// Constants that bound memory and time of every session and stream.
const (
	// MaxCommandBytes bounds the JSON of a command: arguments and environment.
	MaxCommandBytes = 512 << 10
	// MaxStdinPost bounds one stdin request; the body is never held whole.
	MaxStdinPost = 64 << 20
	// stdinChunk is what is held of a stdin request at once.
	stdinChunk = 128 << 10
	// streamChunk is how much of a stream is written at once, at most.
	streamChunk = 64 << 10
	// guestWindow is the output a guest keeps until it is acknowledged.
	guestWindow = 1 << 20
	// ackBytes and ackDelay coalesce acknowledgements.
	ackBytes = 128 << 10
	ackDelay = 20 * time.Millisecond
	// protocolStrikes is how often a guest may break the protocol in a row before
	// its session is given up.
	protocolStrikes = 3
	// MaxExecOutput bounds each stream of a blocking exec.
	MaxExecOutput = 16 << 20
)

// Limits that an installation may set. Zero means the default beside it.
type Limits struct {
	JournalBytes   int64         // of one session; 64 MiB
	SegmentBytes   int64         // step in which old output goes; 1 MiB
	AttachWithin   time.Duration // an unattached session expires; 60 s
	Retain         time.Duration // an ended session and its output are kept; 24 h
	Keepalive      time.Duration // between comments of a silent stream; 10 s
	WriteTimeout   time.Duration // a reader that takes nothing is cut; 60 s
	AttachTokenTTL time.Duration // default life of an attach token; 10 min
	DataTokenTTL   time.Duration // default life of a data token; 1 h
	MaxTokenTTL    time.Duration // 24 h
	TicketTTL      time.Duration // 30 s
	LimitSlack     time.Duration // the host ends a command this long after the guest should have; 10 s
	Sweep          time.Duration // period of expiry and of Sync; 1 s
	Backoff        time.Duration // longest pause between two tries to reach a guest; 2 s
	ExecOutput     int64         // default of ExecRequest.MaxOutput; 1 MiB
}

func (l Limits) withDefaults() Limits {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	defN := func(d *int64, v int64) {
		if *d <= 0 {
			*d = v
		}
	}
	defN(&l.JournalBytes, 64<<20)
	defN(&l.SegmentBytes, 1<<20)
	defN(&l.ExecOutput, 1<<20)
	def(&l.AttachWithin, time.Minute)
	def(&l.Retain, 24*time.Hour)
	def(&l.Keepalive, 10*time.Second)
	def(&l.WriteTimeout, time.Minute)
	def(&l.AttachTokenTTL, 10*time.Minute)
	def(&l.DataTokenTTL, time.Hour)
	def(&l.MaxTokenTTL, 24*time.Hour)
	def(&l.TicketTTL, 30*time.Second)
	def(&l.LimitSlack, 10*time.Second)
	def(&l.Sweep, time.Second)
	def(&l.Backoff, 2*time.Second)
	return l
}
