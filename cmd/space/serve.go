package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/control"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/host"
	"github.com/space-platform/space/internal/httpapi"
	"github.com/space-platform/space/internal/httpguard"
	"github.com/space-platform/space/internal/layout"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/privilege"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/sqlitedb"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/postgres"
	"github.com/space-platform/space/internal/store/sqlite"
	"github.com/space-platform/space/internal/store/sqlstore"
	"github.com/space-platform/space/internal/tenant"
)

// nodeName is the one node of `space up`.
const nodeName = "local"

// headEvery is how often the heads of the audit chains are signed.
const headEvery = 15 * time.Second

type serveOptions struct {
	listen, data     string
	hosts, origins   []string
	tlsCert, tlsKey  string
	insecurePublic   bool
	logLevel         string
	overcommit       float64
	diskOvercommit   float64
	maxSandboxes     int
	maxSandboxesEach int
}

func serveDefaults() serveOptions {
	return serveOptions{listen: "127.0.0.1:7780", data: "127.0.0.1:7781", logLevel: "info", overcommit: 8, diskOvercommit: 1, maxSandboxes: 1000, maxSandboxesEach: 1000}
}

func (o *serveOptions) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&o.listen, "listen", o.listen, "address of the control API")
	f.StringVar(&o.data, "listen-data", o.data, "address of the data plane")
	f.StringSliceVar(&o.hosts, "host", nil, "names that the listeners answer to, besides loopback")
	f.StringSliceVar(&o.origins, "origin", nil, "web origins that may call")
	f.StringVar(&o.tlsCert, "tls-cert", "", "certificate file (PEM), readable by user space")
	f.StringVar(&o.tlsKey, "tls-key", "", "key file (PEM), readable by user space")
	f.BoolVar(&o.insecurePublic, "insecure-public", false, "listen on a public address without TLS")
	f.StringVar(&o.logLevel, "log-level", o.logLevel, "debug, info, warn or error")
	f.Float64Var(&o.overcommit, "cpu-overcommit", o.overcommit, "CPU given away per CPU of the host")
	f.Float64Var(&o.diskOvercommit, "disk-overcommit", o.diskOvercommit, "disk given away per free byte of the host at start; above 1 a full host is possible, since images are sparse")
	f.IntVar(&o.maxSandboxes, "max-sandboxes", o.maxSandboxes, "sandboxes on this node at most")
	f.IntVar(&o.maxSandboxesEach, "max-sandboxes-per-tenant", o.maxSandboxesEach, "living sandboxes of one tenant at most")
}

// args gives the flags again, for the child.
func (o serveOptions) args() []string {
	out := []string{
		"--listen", o.listen, "--listen-data", o.data, "--log-level", o.logLevel,
		"--cpu-overcommit", strconv.FormatFloat(o.overcommit, 'g', -1, 64),
		"--disk-overcommit", strconv.FormatFloat(o.diskOvercommit, 'g', -1, 64),
		"--max-sandboxes", strconv.Itoa(o.maxSandboxes), "--max-sandboxes-per-tenant", strconv.Itoa(o.maxSandboxesEach),
	}
	for _, h := range o.hosts {
		out = append(out, "--host", h)
	}
	for _, h := range o.origins {
		out = append(out, "--origin", h)
	}
	if o.tlsCert != "" {
		out = append(out, "--tls-cert", o.tlsCert, "--tls-key", o.tlsKey)
	}
	if o.insecurePublic {
		out = append(out, "--insecure-public")
	}
	return out
}

// check refuses what would expose the API by accident.
func (o serveOptions) check() error {
	if (o.tlsCert == "") != (o.tlsKey == "") {
		return errors.New("--tls-cert and --tls-key go together")
	}
	for _, a := range []string{o.listen, o.data} {
		h, _, err := net.SplitHostPort(a)
		if err != nil {
			return fmt.Errorf("address %q: %w", a, err)
		}
		ip, err := netip.ParseAddr(h)
		loopback := h == "localhost" || err == nil && ip.IsLoopback()
		if !loopback && o.tlsCert == "" && !o.insecurePublic {
			return fmt.Errorf("%s is not a loopback address and there is no TLS: give --tls-cert and --tls-key, or say --insecure-public", a)
		}
	}
	return nil
}

func serveCmd(l *layout.Layout) *cobra.Command {
	o := serveDefaults()
	c := &cobra.Command{
		Use: "serve", Short: "The unprivileged side (started by `space up`)", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return serve(cmd.Context(), *l, o) },
	}
	o.flags(c)
	return c
}

func newLogger(w io.Writer, level string) *slog.Logger {
	var l slog.Level
	if l.UnmarshalText([]byte(level)) != nil {
		l = slog.LevelInfo
	}
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: l}))
}

func serve(ctx context.Context, l layout.Layout, o serveOptions) error {
	st, err := privilege.Of(0)
	if err != nil {
		return err
	}
	if err := st.Dropped(); err != nil {
		return fmt.Errorf("the unprivileged side refuses to run with privileges (`space up` starts it rightly): %w", err)
	}
	if err := o.check(); err != nil {
		return err
	}
	lock, err := layout.TakeLock(l.ServeLock())
	if err != nil {
		return err
	}
	defer lock.Release()
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	log := newLogger(os.Stderr, o.logLevel).With(slog.String("role", "serve"))

	room, err := connectRoom(ctx, l.HostSocket())
	if err != nil {
		return err
	}
	defer room.Close()
	sealer, err := secret.OpenSealer(filepath.Join(l.State(), "seal.key"))
	if err != nil {
		return err
	}
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	n, sessions, db, err := openNode(ctx, l, o, room, sealer, metrics, log)
	if err != nil {
		return err
	}
	defer db.Close()
	defer n.Close()
	defer sessions.Close()

	ctl, err := openControl(ctx, l, o, n, room.Capabilities(), sessions, sealer, metrics, log)
	if err != nil {
		return err
	}
	defer ctl.store.Close()
	loops, endLoops := context.WithCancel(ctx)
	done := make(chan struct{}, 2)
	go func() { _ = ctl.service.Reconciler().Run(loops); done <- struct{}{} }()
	go func() { signHeads(loops, l, room, ctl.store, n, db, log); done <- struct{}{} }()
	defer func() { endLoops(); <-done; <-done }()

	return listen(ctx, l, o, ctl, sessions, metrics, log)
}

// connectRoom waits for the room: both sides start at the same time, and the
// room may be away for a restart of its own.
func connectRoom(ctx context.Context, socket string) (*host.Client, error) {
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		c, err := host.Connect(ctx, socket)
		if err == nil {
			return c, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("the host room does not answer: %w", err)
		case <-time.After(wait):
		}
	}
}

func openNode(ctx context.Context, l layout.Layout, o serveOptions, room *host.Client, sealer *secret.Sealer, metrics prometheus.Registerer, log *slog.Logger) (n *node.Node, m *session.Manager, db *sqlitedb.DB, err error) {
	facts, err := room.Facts(ctx)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("ask the host room for its capacity: %w", err)
	}
	if db, err = sqlitedb.Open(l.NodeDB()); err != nil {
		return nil, nil, nil, err
	}
	opened := db // the results are nil when this returns an error
	defer func() {
		if err != nil {
			_ = opened.Close()
		}
	}()
	n, err = node.New(ctx, node.Config{
		Name: nodeName, DB: db, Runtime: room, Templates: room.Templates(), Sealer: sealer, Log: log, Metrics: metrics,
		NewGuest: func(m runtime.Machine) guestclient.Guest { return guestclient.New(m.Dial, guestclient.Options{}) },
		Capacity: sandbox.Resources{
			MilliCPU:    int64(facts.CPUs) * 1000,
			MemoryBytes: facts.MemoryBytes - facts.MemoryBytes/10, // a tenth stays with the host
			DiskBytes:   int64(float64(facts.DiskFree) * o.diskOvercommit),
		},
		CPUOvercommit: o.overcommit, MaxSandboxes: o.maxSandboxes,
	})
	if err != nil {
		return nil, nil, nil, err
	}
	m, err = session.New(ctx, session.Config{
		DB: db, Dir: l.Journals(), Guests: n, Sealer: sealer, Auditor: n.Auditor(), Log: log, Metrics: metrics, Activity: n.Activity,
		ProtocolError: n.ReportProtocolError,
	})
	if err != nil {
		return nil, nil, nil, err
	}
	n.Bind(m)
	if err = m.Recover(ctx); err != nil {
		return nil, nil, nil, fmt.Errorf("recover sessions: %w", err)
	}
	if _, err = n.Start(ctx); err != nil { // it logs what it adopted
		return nil, nil, nil, fmt.Errorf("adopt machines: %w", err)
	}
	return n, m, db, nil
}

// controlSide is the control plane and its front door's proof of keys.
type controlSide struct {
	service *control.Service
	auth    *auth.Authenticator
	store   store.Store
	first   auth.First
}

// Verify implements httpapi.Authenticator.
func (c *controlSide) Verify(ctx context.Context, bearer string) (control.Principal, error) {
	return c.auth.Verify(ctx, bearer)
}

func openControl(ctx context.Context, l layout.Layout, o serveOptions, n *node.Node, caps runtime.Capabilities, sessions *session.Manager, sealer *secret.Sealer, metrics prometheus.Registerer, log *slog.Logger) (c *controlSide, err error) {
	c = &controlSide{}
	if c.store, err = openStore(l); err != nil {
		return nil, err
	}
	opened := c.store // c is nil when this returns an error
	defer func() {
		if err != nil {
			_ = opened.Close()
		}
	}()
	c.auth, err = auth.New(auth.Config{
		Store: c.store, HashKey: sealer.Derive("api keys"), Log: log,
		OnRevoke: func(_ tenant.ID, keyID string) {
			go func() {
				if err := sessions.RevokePrincipal(context.WithoutCancel(ctx), keyID); err != nil {
					log.Error("cut the streams of a revoked key", "key", keyID, "err", err)
				}
			}()
		},
	})
	if err != nil {
		return nil, err
	}
	if c.first, err = c.auth.FirstKey(ctx, l.State()); err != nil {
		return nil, err
	}
	c.service, err = control.New(control.Config{
		Store: c.store, Node: n, NodeInfo: control.NodeInfo{Name: nodeName, Runtime: caps.Name, Class: caps.Class},
		Sealer: sealer, Keys: c.auth, HashKey: sealer.Derive("idempotency"), Log: log, Registry: metrics,
		Limits: control.Limits{MaxSandboxes: o.maxSandboxesEach},
	})
	return c, err
}

func openStore(l layout.Layout) (store.Store, error) {
	// A DSN may hold a password, so it comes by environment only.
	if dsn := os.Getenv("SPACE_STORE"); dsn != "" {
		return postgres.Open(dsn)
	}
	return sqlite.Open(l.ControlDB())
}

func listen(ctx context.Context, l layout.Layout, o serveOptions, c *controlSide, sessions *session.Manager, metrics *prometheus.Registry, log *slog.Logger) error {
	var tc *tls.Config
	scheme := "http"
	if o.tlsCert != "" {
		cert, err := tls.LoadX509KeyPair(o.tlsCert, o.tlsKey)
		if err != nil {
			return fmt.Errorf("TLS: %w", err)
		}
		tc = &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
		scheme = "https"
	}
	open := func(addr string) (net.Listener, string, error) {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			return nil, "", fmt.Errorf("listen: %w", err)
		}
		h, port, _ := net.SplitHostPort(ln.Addr().String())
		if ip, err := netip.ParseAddr(h); err == nil && ip.IsUnspecified() {
			h = "127.0.0.1"
		}
		if len(o.hosts) > 0 {
			h = o.hosts[0]
		}
		if tc != nil {
			ln = tls.NewListener(ln, tc)
		}
		return ln, scheme + "://" + net.JoinHostPort(h, port), nil
	}
	apiLn, apiURL, err := open(o.listen)
	if err != nil {
		return err
	}
	dataLn, dataURL, err := open(o.data)
	if err != nil {
		_ = apiLn.Close()
		return err
	}
	guard := httpguard.Guard{Hosts: append(append([]string{}, httpguard.Local...), o.hosts...), Origins: o.origins}
	api := httpapi.New(httpapi.Config{
		Control: c.service, Auth: c, Guard: guard, DataURL: dataURL, Version: version, Log: log,
		Metrics: promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}),
	})
	newServer := func(h http.Handler) *http.Server {
		return &http.Server{
			Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
			ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		}
	}
	servers := []*http.Server{newServer(api), newServer(guard.Wrap(sessions.Handler()))}
	failed := make(chan error, 2)
	go func() { failed <- servers[0].Serve(apiLn) }()
	go func() { failed <- servers[1].Serve(dataLn) }()
	if err := l.WriteEndpoint(layout.Endpoint{API: apiURL, Data: dataURL, PID: os.Getpid(), StartedAt: time.Now().UTC()}); err != nil {
		return err
	}
	announce(c.first, apiURL, dataURL, log)
	select {
	case err = <-failed:
	case <-ctx.Done():
	}
	_ = os.Remove(l.EndpointFile()) // clients fall back to "no server"
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	sessions.Close() // streams end first: they would hold the shutdown
	for _, s := range servers {
		if s.Shutdown(end) != nil {
			_ = s.Close() // what would not end is cut
		}
	}
	return err
}

func announce(first auth.First, apiURL, dataURL string, log *slog.Logger) {
	log.Info("serving", "api", apiURL, "data", dataURL, "version", version)
	// Where this is not read by somebody but kept, in a log, the key does not belong.
	_, err := unix.IoctlGetTermios(int(os.Stderr.Fd()), unix.TCGETS)
	switch {
	case first.New && err == nil:
		fmt.Fprintf(os.Stderr, "space: the admin key, shown once (kept in %s): %s\n", first.Path, first.Key.Reveal())
	case first.New:
		fmt.Fprintf(os.Stderr, "space: the admin key is in %s\n", first.Path)
	}
	ready := os.NewFile(3, "ready")
	if ready != nil {
		_, _ = io.WriteString(ready, "ready\n") // absent when it was not `space up` that started us
		_ = ready.Close()
	}
}

// signHeads has the room sign the ends of both audit chains whenever they moved.
func signHeads(ctx context.Context, l layout.Layout, room audit.Signer, st store.Store, n *node.Node, db *sqlitedb.DB, log *slog.Logger) {
	signed := map[string]uint64{}
	sign := func(ctx context.Context) {
		for _, last := range []func(context.Context) (audit.Record, bool, error){
			func(ctx context.Context) (audit.Record, bool, error) { return lastControl(ctx, st, signed) },
			func(ctx context.Context) (audit.Record, bool, error) { return lastNode(ctx, n.Auditor(), db, signed) },
		} {
			r, ok, err := last(ctx)
			if err == nil && ok {
				var h audit.Head
				if h, err = room.SignHead(ctx, r.Chain, r.Seq, r.Hash); err == nil {
					err = audit.AppendHead(l.AuditHeads(), h)
				}
				if err == nil {
					signed[r.Chain] = r.Seq
				}
			}
			if err != nil && ctx.Err() == nil {
				log.Error("sign the audit head", "err", err)
			}
		}
	}
	for {
		select {
		case <-ctx.Done():
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
			defer cancel()
			sign(end)
			return
		case <-time.After(headEvery):
			sign(ctx)
		}
	}
}

// lastControl gives the control chain's end, when it moved since it was signed.
func lastControl(ctx context.Context, st store.Store, signed map[string]uint64) (audit.Record, bool, error) {
	return newest(signed[sqlstore.Chain], func(from uint64) ([]audit.Record, error) {
		return st.System().AuditAll(ctx, from, 1000)
	})
}

// lastNode gives the node chain's end, when it moved since it was signed.
func lastNode(ctx context.Context, a *node.Auditor, db *sqlitedb.DB, signed map[string]uint64) (audit.Record, bool, error) {
	return newest(signed["node:"+nodeName], func(from uint64) ([]audit.Record, error) {
		return a.Records(ctx, db.Read, from, 1000)
	})
}

// newest walks a chain from what is signed to its end.
func newest(signed uint64, read func(from uint64) ([]audit.Record, error)) (last audit.Record, ok bool, err error) {
	for from := signed + 1; ; from = last.Seq + 1 {
		page, err := read(from)
		if err != nil || len(page) == 0 {
			return last, ok, err
		}
		last, ok = page[len(page)-1], true
	}
}
