// Package guest is the daemon inside a sandbox's machine: it starts processes,
// keeps their output until the host has it, serves files with the rights of
// their user, and takes identity and clock from the host. It is PID 1 in a
// machine and an ordinary process in tests.
//
// Lock order: Server.mu, then process.mu, then output.mu; the reaper's locks
// are taken with none of these held.
//
// It imports nothing of ours but api/guestapi and, in cmd/space-guest, the
// channel.
package guest

import (
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/space-platform/space/api/guestapi"
)

// Options of a Server.
type Options struct {
	Version   string        // build version, for Hello
	KeepClock bool          // never set the wall clock (tests on a host's own kernel)
	Keepalive time.Duration // between keepalive frames; 0 = 5 s
	Processes int           // bound of known processes; 0 = guestapi.MaxProcesses
	// PowerOff ends the machine after Shutdown; nil only answers.
	PowerOff func()
	// HostsFile gets a line for the machine's own name; "" leaves it alone (tests
	// on a host's own files).
	HostsFile string
}

// Server is the daemon's state. Make it with New; it owns every child of the
// program from Run on.
type Server struct {
	opt    Options
	epoch  string
	reaper *reaper

	mu        sync.Mutex
	conf      guestapi.Configure
	processes map[string]*slot
	stopping  bool
}

// slot is a process that exists or is being started.
type slot struct {
	ready chan struct{} // closed when p or err is set
	p     *process
	err   error
}

// New makes a Server; call Run to reap children.
func New(o Options) *Server {
	if o.Keepalive <= 0 {
		o.Keepalive = 5 * time.Second
	}
	if o.Processes <= 0 {
		o.Processes = guestapi.MaxProcesses
	}
	return &Server{opt: o, epoch: rand.Text(), reaper: newReaper(), processes: map[string]*slot{}}
}

// Run reaps children until stop is closed.
func (s *Server) Run(stop <-chan struct{}) { s.reaper.run(stop) }

type handler func(w http.ResponseWriter, r *http.Request) error

func (h handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	err := h(w, r)
	if err == nil {
		return
	}
	f := &failure{status: 500, code: guestapi.CodeIO, message: reason(err)}
	errors.As(err, &f)
	_ = reply(w, f.status, guestapi.Error{Code: f.code, Message: f.message})
}

func reply(w http.ResponseWriter, status int, body any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(status)
	_, _ = w.Write(b)
	return nil
}

func read(w http.ResponseWriter, r *http.Request, into any) error {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, guestapi.MaxMessage))
	if err != nil {
		return refuse(413, guestapi.CodeInvalid, "body: %s", err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		return refuse(400, guestapi.CodeInvalid, "body is not the JSON expected here")
	}
	return nil
}

// Handler serves all paths of guestapi.
func (s *Server) Handler() http.Handler {
	m := http.NewServeMux()
	on := func(method, path string, h handler) { m.Handle(method+" "+path, h) }
	known := func(h func(http.ResponseWriter, *http.Request, *process) error) handler {
		return func(w http.ResponseWriter, r *http.Request) error {
			p, err := s.find(r)
			if err != nil {
				return err
			}
			return h(w, r, p)
		}
	}
	on("POST", guestapi.PathHello, s.handleHello)
	on("POST", guestapi.PathConfigure, s.handleConfigure)
	on("POST", guestapi.PathProcesses, s.handleStart)
	on("GET", guestapi.PathProcesses, s.handleList)
	on("GET", guestapi.PathProcess, known(func(w http.ResponseWriter, _ *http.Request, p *process) error {
		return reply(w, 200, p.describe())
	}))
	on("DELETE", guestapi.PathProcess, known(s.handleForget))
	on("GET", guestapi.PathOutput, known(s.handleOutput))
	on("POST", guestapi.PathAck, known(s.handleAck))
	on("POST", guestapi.PathStdin, known(s.handleStdin))
	on("POST", guestapi.PathCloseStdin, known(s.handleCloseStdin))
	on("POST", guestapi.PathSignal, known(s.handleSignal))
	on("POST", guestapi.PathResize, known(s.handleResize))
	on("GET", guestapi.PathStats, s.handleStats)
	on("GET", guestapi.PathFiles, s.handleGetFile)
	on("PUT", guestapi.PathFiles, s.handlePutFile)
	on("POST", guestapi.PathShutdown, s.handleShutdown)
	return m
}

func (s *Server) handleHello(w http.ResponseWriter, r *http.Request) error {
	var h guestapi.Hello
	if err := read(w, r, &h); err != nil {
		return err
	}
	return reply(w, 200, guestapi.HelloReply{
		Version: guestapi.Version, Nonce: h.Nonce, BootEpoch: s.epoch, Daemon: s.opt.Version, PID: os.Getpid(),
	})
}

const maxID = 128

func (s *Server) handleStart(w http.ResponseWriter, r *http.Request) error {
	var req guestapi.Start
	if err := read(w, r, &req); err != nil {
		return err
	}
	switch {
	case req.ID == "" || len(req.ID) > maxID:
		return refuse(400, guestapi.CodeInvalid, "an id of 1 to %d bytes is needed", maxID)
	case (len(req.Args) > 0) == (req.Shell != ""):
		return refuse(400, guestapi.CodeInvalid, "exactly one of args and shell is needed")
	case len(req.Args) > guestapi.MaxArgs:
		return startFailure(guestapi.CodeArgsTooLong, "more than %d arguments", guestapi.MaxArgs)
	case req.Overflow != "" && req.Overflow != "block" && req.Overflow != "drop":
		return refuse(400, guestapi.CodeInvalid, "overflow is block or drop")
	case req.Window < 0 || req.Window > guestapi.MaxWindow || req.TimeLimit < 0 || req.Grace < 0:
		return refuse(400, guestapi.CodeInvalid, "window, time_limit or grace out of range")
	}
	p, err := s.start(req)
	if err != nil {
		return err
	}
	return reply(w, 200, p.describe())
}

// start starts req once, however many ask: all get the one process, or the one
// failure. After a failure the id is free again.
func (s *Server) start(req guestapi.Start) (*process, error) {
	s.mu.Lock()
	if at, ok := s.processes[req.ID]; ok {
		s.mu.Unlock()
		<-at.ready
		return at.p, at.err
	}
	if s.stopping {
		s.mu.Unlock()
		return nil, refuse(503, guestapi.CodeProcessLimit, "the machine is shutting down")
	}
	if len(s.processes) >= s.opt.Processes && !s.evict() {
		s.mu.Unlock()
		return nil, refuse(503, guestapi.CodeTooManyProcesses, "the daemon knows %d processes; forget ended ones", s.opt.Processes)
	}
	at := &slot{ready: make(chan struct{})}
	s.processes[req.ID] = at
	s.mu.Unlock()

	p, err := s.launch(req)
	s.mu.Lock()
	at.p, at.err = p, err
	if err != nil {
		delete(s.processes, req.ID)
	}
	stopping := s.stopping
	s.mu.Unlock()
	close(at.ready)
	if p != nil && stopping {
		p.family().kill(killWithin)
	}
	return p, err
}

// evict forgets the process that ended first among those whose output is all
// acknowledged. Called with mu held.
func (s *Server) evict() bool {
	oldest := ""
	var when time.Time
	for id, at := range s.processes {
		if at.p == nil {
			continue
		}
		base, next, exit := at.p.out.bounds()
		if exit != nil && base == next && (oldest == "" || exit.At.Before(when)) {
			oldest, when = id, exit.At
		}
	}
	delete(s.processes, oldest)
	return oldest != ""
}

func (s *Server) find(r *http.Request) (*process, error) {
	id := r.PathValue("id")
	s.mu.Lock()
	at := s.processes[id]
	s.mu.Unlock()
	if at != nil {
		select {
		case <-at.ready:
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
		if at.p != nil {
			return at.p, nil
		}
	}
	return nil, refuse(404, guestapi.CodeNoSuchProcess, "no process %.64q is known", id)
}

// all gives every process, oldest first.
func (s *Server) all() []*process {
	s.mu.Lock()
	var out []*process
	for _, at := range s.processes {
		if at.p != nil {
			out = append(out, at.p)
		}
	}
	s.mu.Unlock()
	slices.SortFunc(out, func(a, b *process) int {
		return cmp.Or(a.started.Compare(b.started), cmp.Compare(a.id, b.id))
	})
	return out
}

func (s *Server) handleList(w http.ResponseWriter, _ *http.Request) error {
	list := guestapi.ProcessList{Processes: []guestapi.Process{}}
	for _, p := range s.all() {
		list.Processes = append(list.Processes, p.describe())
	}
	return reply(w, 200, list)
}

func (s *Server) handleForget(w http.ResponseWriter, _ *http.Request, p *process) error {
	if _, _, exit := p.out.bounds(); exit == nil {
		return refuse(409, guestapi.CodeProcessRunning, "the process has not ended")
	}
	s.mu.Lock()
	if at := s.processes[p.id]; at != nil && at.p == p {
		delete(s.processes, p.id)
	}
	s.mu.Unlock()
	return reply(w, 200, struct{}{})
}

func (s *Server) handleAck(w http.ResponseWriter, r *http.Request, p *process) error {
	var a guestapi.Ack
	if err := read(w, r, &a); err != nil {
		return err
	}
	if !p.out.ack(a.Offset) {
		return refuse(409, guestapi.CodeOffsetAhead, "no output at %d yet", a.Offset)
	}
	return reply(w, 200, struct{}{})
}

func (s *Server) handleOutput(w http.ResponseWriter, r *http.Request, p *process) error {
	pos, err := strconv.ParseUint(r.URL.Query().Get("from"), 10, 63)
	if err != nil {
		return refuse(400, guestapi.CodeInvalid, "from is not a number")
	}
	if _, next, _ := p.out.bounds(); pos > next {
		return refuse(409, guestapi.CodeOffsetAhead, "no output at %d yet", pos)
	}
	ctl := http.NewResponseController(w)
	// A reader that went away must not leave this handler in a blocked write.
	stop := onDone(r, func() { _ = ctl.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.WriteHeader(200)
	fw := guestapi.NewFrameWriter(w)
	room := make([]byte, guestapi.FrameHeader+guestapi.MaxFramePayload)
	buf := room[guestapi.FrameHeader:]
	tick := time.NewTicker(s.opt.Keepalive)
	defer tick.Stop()
	for {
		l := p.out.at(pos, buf)
		switch l.typ {
		case guestapi.FrameGap:
			err = fw.Gap(pos, l.base-pos)
			pos = l.base
		case guestapi.FrameExit:
			_ = fw.Exit(pos, *l.exit)
			return nil
		case guestapi.FrameStdout, guestapi.FrameStderr:
			err = fw.InPlace(l.typ, pos, room[:guestapi.FrameHeader+l.n])
			pos += uint64(l.n)
		default:
			if err = ctl.Flush(); err != nil {
				return nil
			}
			select {
			case <-l.wait:
			case <-tick.C:
				err = fw.Keepalive(pos)
			case <-r.Context().Done():
				return nil
			}
		}
		if err != nil {
			return nil // the body has begun; the reader sees it break off
		}
	}
}

func (s *Server) handleSignal(w http.ResponseWriter, r *http.Request, p *process) error {
	var req guestapi.Signal
	if err := read(w, r, &req); err != nil {
		return err
	}
	n := guestapi.SignalNumber(req.Signal)
	if n == 0 {
		return refuse(400, guestapi.CodeInvalid, "%.32q is no signal", req.Signal)
	}
	if err := p.signal(sysSignal(n), req.Tree); err != nil {
		return err
	}
	return reply(w, 200, struct{}{})
}
