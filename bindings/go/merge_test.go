// SPDX-License-Identifier: Apache-2.0

package flashattn

import (
	"errors"
	"math"
	"strings"
	"testing"
)

func TestMerge(t *testing.T) {
	ctx := open(t)
	s := sizes{2, 5, 32, 4, 2, 8}
	rows, keys := s.batch*s.rowsQ*s.headsQ*s.dim, s.batch*s.rowsK*s.headsK*s.dim
	q, k, v := normal(1, rows), normal(2, keys), normal(3, keys)
	shapeQ, shapeLSE := []int{s.batch, s.rowsQ, s.headsQ, s.dim}, []int{s.batch, s.headsQ, s.rowsQ}
	wantOut, wantLSE, _, _, _, _ := reference(s, q, k, v, make([]float32, rows), func(b, i, j int) bool { return true })
	over := func(from, to int) Part { // the keys from <= j < to
		part := func(x []float32) Tensor {
			step := s.headsK * s.dim
			return Strided(x, from*step, []int{s.batch, to - from, s.headsK, s.dim}, []int{s.rowsK * step, step, s.dim, 1})
		}
		p := Part{Of(make([]float32, rows), shapeQ...), Of(make([]float32, len(wantLSE)), shapeLSE...)}
		if err := ctx.Forward(Attention{Q: Of(q, shapeQ...), K: part(k), V: part(v)}, p.Out, p.LSE); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for _, count := range []int{1, 2, 3, 16} {
		var parts []Part
		for n := 0; n < count; n++ {
			parts = append(parts, over(n*s.rowsK/count, (n+1)*s.rowsK/count))
		}
		out, lse := make([]float32, rows), make([]float32, len(wantLSE))
		if err := ctx.Merge(parts, Of(out, shapeQ...), Of(lse, shapeLSE...)); err != nil {
			t.Fatal(err)
		}
		near(t, "out", out, wantOut, 1e-5)
		near(t, "lse", lse, wantLSE, 1e-5)
		out = make([]float32, rows)
		if err := ctx.Merge(parts, Of(out, shapeQ...), Tensor{}); err != nil {
			t.Fatal(err)
		}
		near(t, "out without lse", out, wantOut, 1e-5)
	}

	// A part without keys does not contribute, whatever its out is. The result may be one of the parts.
	nothing := Part{Of(filled(rows, float32(math.NaN())), shapeQ...), Of(filled(len(wantLSE), float32(math.Inf(-1))), shapeLSE...)}
	out, lse := make([]float32, rows), make([]float32, len(wantLSE))
	all := Part{Of(out, shapeQ...), Of(lse, shapeLSE...)}
	if err := ctx.Merge([]Part{over(0, 20), over(20, s.rowsK)}, all.Out, all.LSE); err != nil {
		t.Fatal(err)
	}
	if err := ctx.Merge([]Part{nothing, all}, all.Out, all.LSE); err != nil {
		t.Fatal(err)
	}
	near(t, "out", out, wantOut, 1e-5)
	near(t, "lse", lse, wantLSE, 1e-5)

	one := over(0, s.rowsK)
	if err := ctx.PrepareMerge([]Part{one, one}, all.Out, all.LSE); err != nil {
		t.Fatal(err)
	}
	plan, err := ctx.QueryMerge([]Part{one, one}, all.Out, all.LSE)
	if err != nil || !strings.Contains(plan.Kernel, "merge") || plan.Flops != float64(2*2*rows) {
		t.Fatal(plan, err)
	}
	if _, err := ctx.QueryMerge(nil, all.Out, all.LSE); !errors.Is(err, ErrInvalidArgument) {
		t.Fatal(err)
	}
	if err := ctx.Merge(nil, all.Out, all.LSE); !errors.Is(err, ErrInvalidArgument) {
		t.Fatal(err)
	}
	if err := ctx.Merge(filled(17, one), all.Out, all.LSE); !errors.Is(err, ErrInvalidArgument) || !strings.Contains(err.Error(), "17 parts") {
		t.Fatal(err)
	}
	if err := ctx.Merge([]Part{one, {Out: Of(out[1:], shapeQ...), LSE: one.LSE}}, all.Out, all.LSE); !errors.Is(err, ErrShape) ||
		!strings.Contains(err.Error(), "parts[1].Out: ") {
		t.Fatal(err)
	}
	if err := ctx.Merge([]Part{{one.LSE, one.Out}}, all.Out, all.LSE); !errors.Is(err, ErrShape) {
		t.Fatal(err)
	}
}
