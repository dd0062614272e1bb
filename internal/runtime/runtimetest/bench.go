package runtimetest

import (
	"context"
	"testing"
)

// BenchColdCreate measures Create, Start and, where there is a guest, its first
// answer. Destroy is not in the time.
func BenchColdCreate(b *testing.B, f Factory) {
	e := newEnv(b, f.defaults())
	guest := e.caps.RealGuest || f.GuestFiles
	for b.Loop() {
		m := e.boot()
		if guest {
			e.hello(m)
		}
		b.StopTimer()
		e.must("Destroy", m.Destroy(e.ctx()))
		b.StartTimer()
	}
}

// BenchDial measures opening and closing one stream of a guest that is up.
func BenchDial(b *testing.B, f Factory) {
	e := newEnv(b, f.defaults())
	m := e.boot()
	if e.caps.RealGuest || f.GuestFiles {
		e.hello(m)
	}
	ctx := context.Background()
	for b.Loop() {
		c, err := m.Dial(ctx)
		e.must("Dial", err)
		e.must("Close", c.Close())
	}
}

// BenchPauseResume measures one Pause and one Resume.
func BenchPauseResume(b *testing.B, f Factory) {
	e := newEnv(b, f.defaults())
	m := e.boot()
	ctx := context.Background()
	for b.Loop() {
		e.must("Pause", m.Pause(ctx))
		e.must("Resume", m.Resume(ctx))
	}
}
