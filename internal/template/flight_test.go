package template

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestFlightIsOneBuild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f flight
		var builds, told atomic.Int64
		results := make(chan Info, 20)
		for range 20 {
			go func() {
				info, err := f.do(t.Context(), "k", func(string) { told.Add(1) }, func(ctx context.Context, step func(string)) (Info, error) {
					builds.Add(1)
					time.Sleep(time.Minute)
					step("half")
					time.Sleep(time.Minute)
					return Info{Digest: "d"}, nil
				})
				if err != nil {
					t.Error(err)
				}
				results <- info
			}()
		}
		for range 20 {
			if got := <-results; got.Digest != "d" {
				t.Errorf("info %v", got)
			}
		}
		if builds.Load() != 1 || told.Load() != 20 {
			t.Errorf("%d builds, %d told", builds.Load(), told.Load())
		}
	})
}

func TestFlightGoesOnWithoutItsFirstCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f flight
		build := func(ctx context.Context, _ func(string)) (Info, error) {
			select {
			case <-ctx.Done():
				return Info{}, ctx.Err()
			case <-time.After(time.Hour):
				return Info{Digest: "d"}, nil
			}
		}
		first, cancel := context.WithCancel(t.Context())
		gone := make(chan error, 1)
		go func() { _, err := f.do(first, "k", nil, build); gone <- err }()
		synctest.Wait()
		second := make(chan error, 1)
		go func() { _, err := f.do(t.Context(), "k", nil, build); second <- err }()
		synctest.Wait()
		cancel()
		if err := <-gone; !errors.Is(err, context.Canceled) {
			t.Errorf("first caller: %v", err)
		}
		if err := <-second; err != nil {
			t.Errorf("second caller: %v", err)
		}
	})
}

func TestFlightEndsWithItsLastCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f flight
		ended := false
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := f.do(ctx, "k", nil, func(ctx context.Context, _ func(string)) (Info, error) {
			<-ctx.Done()
			time.Sleep(time.Second) // clearing up
			ended = true
			return Info{}, ctx.Err()
		})
		if !errors.Is(err, context.DeadlineExceeded) || !ended {
			t.Fatalf("error %v, build ended %t", err, ended)
		}
		info, err := f.do(t.Context(), "k", nil, func(context.Context, func(string)) (Info, error) { return Info{Digest: "new"}, nil })
		if err != nil || info.Digest != "new" {
			t.Fatalf("after it: %v %v", info, err)
		}
	})
}
