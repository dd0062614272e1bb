package channel

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/hashicorp/yamux"
)

// ServeOptions of Serve; the zero value is right for a socket.
type ServeOptions struct {
	Hello Hello
	Log   *slog.Logger // nil = silent
}

// Serve is the guest's end: it dials the host, answers the HTTP requests that
// arrive on streams with h, and dials again within a second when the host is
// gone, until ctx ends. Requests in flight on a lost connection have their
// context cancelled. It returns ctx.Err().
func Serve(ctx context.Context, dial func(context.Context) (net.Conn, error), h http.Handler, o ServeOptions) error {
	const least, most = 20 * time.Millisecond, time.Second
	log := o.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	wait := least
	for {
		began := time.Now()
		err := serveOnce(ctx, dial, h, o.Hello)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Since(began) > most {
			wait = least
		}
		log.Debug("channel lost", "err", err, "redial_in", wait)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
		wait = min(2*wait, most)
	}
}

func serveOnce(ctx context.Context, dial func(context.Context) (net.Conn, error), h http.Handler, hi Hello) error {
	dctx, cancel := context.WithTimeout(ctx, helloTimeout)
	raw, err := dial(dctx)
	cancel()
	if err != nil {
		return err
	}
	defer func() { _ = raw.Close() }()
	unhook := context.AfterFunc(ctx, func() { _ = raw.Close() })
	defer unhook()
	conn, err := hello(raw, hi)
	if err != nil {
		return err
	}
	ear := &heard{Conn: &slowWriter{Conn: conn}}
	s, err := yamux.Server(ear, config())
	if err != nil {
		return err
	}
	defer func() { _ = s.Close() }()
	go ping(s, ear)
	base, stop := context.WithCancel(ctx)
	defer stop()
	srv := &http.Server{
		Handler:           h,
		BaseContext:       func(net.Listener) context.Context { return base },
		ReadHeaderTimeout: 30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	err = srv.Serve(s)
	stop()
	_ = srv.Close()
	return err
}

// ping ends the session when the host neither answers nor sends anything for
// pingTimeout. Every byte counts as a sign of life, so that a busy host is not
// taken for a dead one; and after a pause of the machine the first failing ping
// makes the guest dial again.
func ping(s *yamux.Session, ear *heard) {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.CloseChan():
			return
		case <-tick.C:
		}
		ok := make(chan error, 1)
		go func() { _, err := s.Ping(); ok <- err }()
		sent := time.Now()
		for waiting := true; waiting; {
			select {
			case err := <-ok:
				if err != nil {
					_ = s.Close()
					return
				}
				waiting = false
			case <-s.CloseChan():
				return
			case <-time.After(pingTimeout):
				if last := ear.at.Load(); last < sent.UnixNano() || time.Since(time.Unix(0, last)) > pingTimeout {
					_ = s.Close()
					return
				}
			}
		}
	}
}
