package fake

import (
	"encoding/json"
	"errors"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/runtime"
)

// maxFile bounds one file that the stub takes.
const maxFile = 64 << 20

// keepalive is how often an output stream without output says so.
const keepalive = 5 * time.Second

// Daemon is the stub of a guest daemon: it answers guestapi with Programs as
// processes and the machine's simulated disk as files. It lives for one boot.
type Daemon struct {
	r   *run
	srv *http.Server
	ln  *listener

	mu         sync.Mutex // taken after w.mu, never before
	ended      bool
	nextPID    int
	procs      map[string]*process
	configured []guestapi.Configure
}

func newDaemon(r *run) *Daemon {
	d := &Daemon{
		r: r, procs: map[string]*process{}, nextPID: 2,
		ln: &listener{conns: make(chan net.Conn), done: make(chan struct{})},
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+guestapi.PathHello, d.hello)
	mux.HandleFunc("POST "+guestapi.PathConfigure, d.configure)
	mux.HandleFunc("POST "+guestapi.PathProcesses, d.start)
	mux.HandleFunc("GET "+guestapi.PathProcesses, d.list)
	mux.HandleFunc("GET "+guestapi.PathProcess, d.withProcess(d.get))
	mux.HandleFunc("DELETE "+guestapi.PathProcess, d.withProcess(d.forget))
	mux.HandleFunc("GET "+guestapi.PathOutput, d.withProcess(d.output))
	mux.HandleFunc("POST "+guestapi.PathAck, d.withProcess(d.ack))
	mux.HandleFunc("POST "+guestapi.PathStdin, d.withProcess(d.stdin))
	mux.HandleFunc("POST "+guestapi.PathCloseStdin, d.withProcess(d.closeStdin))
	mux.HandleFunc("POST "+guestapi.PathSignal, d.withProcess(d.signal))
	mux.HandleFunc("POST "+guestapi.PathResize, d.withProcess(d.resize))
	mux.HandleFunc("GET "+guestapi.PathStats, d.stats)
	mux.HandleFunc("GET "+guestapi.PathFiles, d.getFile)
	mux.HandleFunc("PUT "+guestapi.PathFiles, d.putFile)
	mux.HandleFunc("POST "+guestapi.PathShutdown, d.shutdown)
	d.srv = &http.Server{Handler: mux, ErrorLog: log.New(io.Discard, "", 0)}
	go func() { _ = d.srv.Serve(d.ln) }() // ends with the listener, always with an error
	return d
}

func (d *Daemon) serve(c net.Conn) {
	if !d.r.conns.add(c) {
		_ = c.Close() // the machine has just ended
		return
	}
	go func() {
		select {
		case d.ln.conns <- &leaving{Conn: c, set: &d.r.conns}:
		case <-d.ln.done:
			_ = c.Close() // likewise
		}
	}()
}

// leaving takes the stub's end out of the books when the server closes it.
type leaving struct {
	net.Conn
	set *connSet
}

func (c *leaving) Close() error {
	c.set.remove(c.Conn)
	return c.Conn.Close()
}

// end is the death of the guest.
func (d *Daemon) end() {
	d.mu.Lock()
	d.ended = true
	procs := slices.Collect(maps.Values(d.procs))
	d.mu.Unlock()
	for _, p := range procs {
		p.vanish()
	}
	_ = d.srv.Close() // the listener's Close cannot fail
	_ = d.ln.Close()
}

// Configured lists what the host has bound in this boot, in order.
func (d *Daemon) Configured() []guestapi.Configure {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.configured)
}

// Processes describes every process that the stub knows, by id.
func (d *Daemon) Processes() map[string]guestapi.Process {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := map[string]guestapi.Process{}
	for id, p := range d.procs {
		out[id] = p.describe()
	}
	return out
}

func (d *Daemon) running() int {
	n := 0
	for _, p := range d.Processes() {
		if p.State == guestapi.ProcessRunning {
			n++
		}
	}
	return n
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the host has gone away: its matter
}

func refuse(w http.ResponseWriter, status int, code, message string) {
	answer(w, status, guestapi.Error{Code: code, Message: message})
}

// body reads a JSON request.
func body(w http.ResponseWriter, r *http.Request, v any) bool {
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, guestapi.MaxMessage)).Decode(v); err != nil {
		refuse(w, http.StatusBadRequest, guestapi.CodeInvalid, "body is not the JSON that was expected")
		return false
	}
	return true
}

func (d *Daemon) hello(w http.ResponseWriter, r *http.Request) {
	var in guestapi.Hello
	if body(w, r, &in) {
		answer(w, http.StatusOK, guestapi.HelloReply{
			Version: guestapi.Version, Nonce: in.Nonce, BootEpoch: d.r.bootID, Daemon: "fake", PID: 1,
		})
	}
}

func (d *Daemon) configure(w http.ResponseWriter, r *http.Request) {
	var in guestapi.Configure
	if body(w, r, &in) {
		d.mu.Lock()
		d.configured = append(d.configured, in)
		d.mu.Unlock()
		answer(w, http.StatusOK, struct{}{})
	}
}

func (d *Daemon) start(w http.ResponseWriter, r *http.Request) {
	var in guestapi.Start
	if !body(w, r, &in) {
		return
	}
	if in.ID == "" || (len(in.Args) == 0) == (in.Shell == "") {
		refuse(w, http.StatusBadRequest, guestapi.CodeInvalid, "an id and exactly one of args and shell are needed")
		return
	}
	world := d.r.w
	world.mu.Lock()
	prog, args := world.program(in)
	world.mu.Unlock()

	d.mu.Lock()
	p := d.procs[in.ID]
	fresh := p == nil
	switch {
	case d.ended:
		d.mu.Unlock()
		refuse(w, http.StatusServiceUnavailable, guestapi.CodeIO, "the machine has ended")
		return
	case fresh && prog == nil:
		d.mu.Unlock()
		refuse(w, http.StatusUnprocessableEntity, guestapi.CodeNotFound, "no program "+strconv.Quote(args[0]))
		return
	case fresh && len(d.procs) >= guestapi.MaxProcesses:
		d.mu.Unlock()
		refuse(w, http.StatusServiceUnavailable, guestapi.CodeTooManyProcesses, "too many processes are known")
		return
	case fresh:
		env := map[string]string{}
		if n := len(d.configured); n > 0 {
			maps.Copy(env, d.configured[n-1].Env)
		}
		maps.Copy(env, in.Env)
		p = newProcess(d.r, in, d.nextPID)
		d.nextPID++
		d.procs[in.ID] = p
		d.mu.Unlock()
		world.mu.Lock()
		world.execs[in.ID]++
		world.mu.Unlock()
		p.launch(prog, args, env)
	default:
		d.mu.Unlock()
	}
	answer(w, http.StatusOK, p.describe())
}

func (d *Daemon) list(w http.ResponseWriter, _ *http.Request) {
	all := d.Processes()
	out := struct {
		Processes []guestapi.Process `json:"processes"`
	}{Processes: []guestapi.Process{}}
	for _, id := range slices.Sorted(maps.Keys(all)) {
		out.Processes = append(out.Processes, all[id])
	}
	answer(w, http.StatusOK, out)
}

func (d *Daemon) withProcess(h func(http.ResponseWriter, *http.Request, *process)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		d.mu.Lock()
		p := d.procs[r.PathValue("id")]
		d.mu.Unlock()
		if p == nil {
			refuse(w, http.StatusNotFound, guestapi.CodeNoSuchProcess, "no such process")
			return
		}
		h(w, r, p)
	}
}

func (d *Daemon) get(w http.ResponseWriter, _ *http.Request, p *process) {
	answer(w, http.StatusOK, p.describe())
}

func (d *Daemon) forget(w http.ResponseWriter, r *http.Request, p *process) {
	if p.describe().State == guestapi.ProcessRunning {
		refuse(w, http.StatusConflict, guestapi.CodeProcessRunning, "the process is running")
		return
	}
	d.mu.Lock()
	delete(d.procs, r.PathValue("id"))
	d.mu.Unlock()
	answer(w, http.StatusOK, struct{}{})
}

func (d *Daemon) output(w http.ResponseWriter, r *http.Request, p *process) {
	at, err := number(r, "from")
	if err != nil || at > p.describe().Next {
		refuse(w, http.StatusConflict, guestapi.CodeOffsetAhead, "from is not an offset that was reached")
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w)
	fw := guestapi.NewFrameWriter(w)
	_ = flush.Flush() // a broken stream shows at the next write
	for {
		c, gap, exit, changed := p.read(at)
		switch {
		case gap > 0:
			err = fw.Gap(at, gap)
			at += gap
		case len(c.data) > 0:
			err = fw.Data(c.stream, at, c.data)
			at += uint64(len(c.data))
		case exit != nil:
			_ = fw.Exit(at, *exit) // the last frame; the host asks again when it missed it
			return
		default:
			select {
			case <-changed:
				continue
			case <-r.Context().Done():
				return
			case <-d.r.ended:
				return
			case <-d.r.w.clock.After(keepalive):
				err = fw.Keepalive(at)
			}
		}
		if err != nil || flush.Flush() != nil {
			return
		}
	}
}

func (d *Daemon) ack(w http.ResponseWriter, r *http.Request, p *process) {
	var in guestapi.Ack
	if !body(w, r, &in) {
		return
	}
	if !p.release(in.Offset) {
		refuse(w, http.StatusConflict, guestapi.CodeOffsetAhead, "acknowledged more than there is")
		return
	}
	answer(w, http.StatusOK, struct{}{})
}

func (d *Daemon) stdin(w http.ResponseWriter, r *http.Request, p *process) {
	offset, err := number(r, "offset")
	if err != nil {
		refuse(w, http.StatusBadRequest, guestapi.CodeInvalid, "offset is not a number")
		return
	}
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, guestapi.MaxStdinChunk))
	if err != nil {
		refuse(w, http.StatusBadRequest, guestapi.CodeInvalid, "stdin chunk is cut or too large")
		return
	}
	reply, ahead := p.feed(offset, data)
	if ahead {
		answer(w, http.StatusConflict, struct {
			guestapi.Error
			guestapi.StdinReply
		}{guestapi.Error{Code: guestapi.CodeStdinAhead, Message: "offset lies ahead of what was accepted"}, reply})
		return
	}
	answer(w, http.StatusOK, reply)
}

func (d *Daemon) closeStdin(w http.ResponseWriter, _ *http.Request, p *process) {
	answer(w, http.StatusOK, p.closeStdin())
}

func (d *Daemon) signal(w http.ResponseWriter, r *http.Request, p *process) {
	var in guestapi.Signal
	if !body(w, r, &in) {
		return
	}
	n := guestapi.SignalNumber(in.Signal)
	if n == 0 {
		refuse(w, http.StatusBadRequest, guestapi.CodeInvalid, "no such signal")
		return
	}
	if !p.kill(n) {
		refuse(w, http.StatusConflict, guestapi.CodeProcessEnded, "the process has ended")
		return
	}
	answer(w, http.StatusOK, struct{}{})
}

func (d *Daemon) resize(w http.ResponseWriter, r *http.Request, p *process) {
	var in guestapi.Size
	if !body(w, r, &in) {
		return
	}
	if p.start.PTY == nil {
		refuse(w, http.StatusConflict, guestapi.CodeNoTerminal, "the process has no terminal")
		return
	}
	answer(w, http.StatusOK, struct{}{})
}

func (d *Daemon) stats(w http.ResponseWriter, _ *http.Request) {
	r := d.r
	r.w.mu.Lock()
	used := r.m.diskUsed()
	r.w.mu.Unlock()
	res := r.m.spec.Resources
	answer(w, http.StatusOK, guestapi.Stats{
		MemoryTotal: uint64(res.MemoryBytes), MemoryAvailable: uint64(res.MemoryBytes) / 2,
		DiskTotal: uint64(res.DiskBytes), DiskFree: uint64(max(res.DiskBytes-int64(used), 0)),
		Processes: 1 + d.running(), CPUs: 1, DaemonRSS: 4 << 20,
	})
}

func (d *Daemon) getFile(w http.ResponseWriter, r *http.Request) {
	d.r.w.mu.Lock()
	data, ok := d.r.m.disk[r.URL.Query().Get("path")]
	d.r.w.mu.Unlock()
	if !ok {
		refuse(w, http.StatusNotFound, guestapi.CodeNotFound, "no such file")
		return
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(data)))
	_, _ = w.Write(data) // the host has gone away: its matter
}

func (d *Daemon) putFile(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("path")
	if name == "" {
		refuse(w, http.StatusBadRequest, guestapi.CodeInvalid, "path is missing")
		return
	}
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxFile))
	if err != nil {
		refuse(w, http.StatusBadRequest, guestapi.CodeInvalid, "body is cut or too large")
		return
	}
	d.r.w.mu.Lock()
	if d.r.m.run == d.r {
		err = d.r.m.write(name, data)
	} else {
		err = runtime.ErrNotRunning
	}
	d.r.w.mu.Unlock()
	switch {
	case errors.Is(err, errDiskFull):
		refuse(w, http.StatusInsufficientStorage, guestapi.CodeNoSpace, "no space left on the disk")
	case err != nil:
		refuse(w, http.StatusInternalServerError, guestapi.CodeIO, "the machine has ended")
	default:
		answer(w, http.StatusOK, struct{}{})
	}
}

// shutdown powers off from the inside, after the answer.
func (d *Daemon) shutdown(w http.ResponseWriter, _ *http.Request) {
	answer(w, http.StatusOK, struct{}{})
	_ = http.NewResponseController(w).Flush() // the host has gone away: powers off all the same
	world := d.r.w
	world.mu.Lock()
	defer world.mu.Unlock()
	if d.r.m.run == d.r {
		world.endLocked(d.r.m, runtime.Dead, runtime.Exit{Cause: runtime.CausePoweroff})
	}
}

func number(r *http.Request, name string) (uint64, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return 0, nil
	}
	return strconv.ParseUint(s, 10, 63)
}
