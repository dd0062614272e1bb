package quota

import (
	"testing"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/tenant"
	"pgregory.net/rapid"
)

func mint(t interface{ Fatal(...any) }, name string) tenant.ID {
	id, err := tenant.Mint(name)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestChargeIsRefusedAtEitherCap(t *testing.T) {
	a, b := sandbox.NewID(), sandbox.NewID()
	who := mint(t, "acme")
	l := New(map[Kind]Cap{Sessions: {Sandbox: 2, Tenant: 3}})
	for range 2 {
		if err := l.Charge(who, a, Sessions, 1); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Charge(who, a, Sessions, 1); !fault.IsCode(err, "quota") || !fault.IsClass(err, fault.Exhausted) {
		t.Fatalf("third of two: %v", err)
	}
	if err := l.Charge(who, b, Sessions, 1); err != nil {
		t.Fatal(err)
	}
	if err := l.Charge(who, b, Sessions, 1); !fault.IsCode(err, "quota") {
		t.Fatalf("fourth of three of the tenant: %v", err)
	}
	if err := l.Charge(mint(t, "other"), b, Sessions, 1); err != nil {
		t.Fatalf("another tenant pays for us: %v", err)
	}
	l.Refund(who, a, Sessions, 1)
	if err := l.Charge(who, b, Sessions, 1); err != nil {
		t.Fatal(err)
	}
}

// The sums equal what was charged and not refunded, and a refused charge
// leaves no trace.
func TestLedgerAgainstModel(t *testing.T) {
	tenants := []tenant.ID{mint(t, "a"), mint(t, "b")}
	boxes := []sandbox.ID{sandbox.NewID(), sandbox.NewID(), sandbox.NewID()}
	rapid.Check(t, func(t *rapid.T) {
		limit := Cap{Sandbox: rapid.Int64Range(0, 20).Draw(t, "cap"), Tenant: rapid.Int64Range(0, 30).Draw(t, "tenant cap")}
		l := New(map[Kind]Cap{Readers: limit})
		model := map[account]int64{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			who := rapid.SampledFrom(tenants).Draw(t, "tenant")
			box := rapid.SampledFrom(boxes).Draw(t, "sandbox")
			n := rapid.Int64Range(0, 8).Draw(t, "n")
			own, sum := account{who.String(), box, Readers}, account{who.String(), "", Readers}
			if rapid.Bool().Draw(t, "refund") {
				l.Refund(who, box, Readers, n)
				n = min(n, model[own])
				model[own] -= n
				model[sum] -= n
			} else {
				ok := (limit.Sandbox == 0 || model[own]+n <= limit.Sandbox) && (limit.Tenant == 0 || model[sum]+n <= limit.Tenant)
				if err := l.Charge(who, box, Readers, n); (err == nil) != ok {
					t.Fatalf("charge %d: %v, model says %v", n, err, ok)
				}
				if ok {
					model[own] += n
					model[sum] += n
				}
			}
			for _, tn := range tenants {
				for _, b := range append([]sandbox.ID{""}, boxes...) {
					if got, want := l.Used(tn, b, Readers), model[account{tn.String(), b, Readers}]; got != want {
						t.Fatalf("used %s %s = %d, want %d", tn, b, got, want)
					}
				}
			}
		}
	})
}
