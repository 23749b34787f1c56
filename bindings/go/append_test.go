// SPDX-License-Identifier: Apache-2.0

package flashattn

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
)

// format is how a test reads and writes elements of a type, and how far a rounded number may lie from the exact one.
type format[T Element] struct {
	of      func(float32) T
	value   func(T) float64
	nearest func(x float64) float64 // half the distance between numbers near x
	largest float64                 // what greater numbers become; 0 = there are none
}

var (
	asFloat32 = format[float32]{func(x float32) float32 { return x }, func(x float32) float64 { return float64(x) },
		func(x float64) float64 { return math.Abs(x) * 0x1p-21 }, 0} // a sum of two products
	asBFloat16 = format[BFloat16]{ToBFloat16, func(x BFloat16) float64 { return float64(x.Float32()) },
		func(x float64) float64 { return math.Abs(x)*0x1p-8 + 1e-6 }, 0}
	asInt8 = format[int8]{func(x float32) int8 { return int8(x) }, func(x int8) float64 { return float64(x) },
		func(x float64) float64 { return 0.5 }, 127}
	asFloat8 = format[Float8]{func(x float32) Float8 { return 0x58 }, // 16, the only number the test writes
		func(x Float8) float64 {
			exponent, value := int(x>>3&15), float64(x&7)/8
			if exponent > 0 {
				value, exponent = value+1, exponent-1
			}
			return math.Copysign(math.Ldexp(value, exponent-6), 64-float64(x&0x80))
		},
		func(x float64) float64 { return math.Max(math.Abs(x)/16, 0x1p-10) }, 448}
)

// setting is one way to append rows.
type setting struct {
	paged, packed, rotary, interleaved, positions, inPlace, rowDescales bool
}

const (
	appendBatch, appendRows, appendCapacity, pageSize, pageCount = 4, 4, 16, 4, 19
	appendHeads, appendHeadsQ, appendDim, appendDimV, rotaryDim  = 2, 4, 12, 10, 8
	untouched                                                    = 16 // what memory holds that nothing should write
)

var (
	// Sequence 1 is left out; sequence 2 runs over the end of its cache.
	appendOffsets = []int32{3, -1, 13, 0}
	appendUsed    = []int32{4, 2, 4, 2}
	// Sequence 3 has no page for its rows from 0 on.
	appendPages = []int32{7, 2, 18, 0, 3, 4, 5, 6, 8, 9, 10, 11, -1, 12, 13, 14}
)

// place is where row i of sequence n belongs in a cache.
func (s setting) place(n, i int) (outer, row int, exists bool) {
	row = int(appendOffsets[n]) + i
	if appendOffsets[n] < 0 || i >= int(appendUsed[n]) || row >= appendCapacity {
		return 0, 0, false
	}
	if !s.paged {
		return n, row, true
	}
	page := appendPages[n*appendCapacity/pageSize+row/pageSize]
	return int(page), row % pageSize, page >= 0
}

// plainRotation rotates the first columns of a row at a position.
func (s setting) plainRotation(row []float64, cos, sin []float32, position int) {
	for c := 0; c < rotaryDim/2 && s.rotary; c++ {
		a, b := c, c+rotaryDim/2
		if s.interleaved {
			a, b = 2*c, 2*c+1
		}
		x, y := row[a], row[b]
		co, si := float64(cos[position*rotaryDim/2+c]), float64(sin[position*rotaryDim/2+c])
		row[a], row[b] = x*co-y*si, x*si+y*co
	}
}

func filled[T any](n int, x T) []T {
	data := make([]T, n)
	for i := range data {
		data[i] = x
	}
	return data
}

// appendAndCompare appends rows of S to caches of C, and compares every element with a plain implementation.
func appendAndCompare[S, C Element](t *testing.T, ctx *Context, s setting, source format[S], target format[C]) {
	tables := func(seed int64) []float32 { return normal(seed, 2*appendCapacity*rotaryDim/2) }
	cos, sin := tables(1), tables(2)
	rows := func(seed int64, heads, dim int) ([]S, []float64, []int) {
		data := make([]S, appendBatch*appendRows*heads*dim)
		exact := make([]float64, len(data))
		for i, x := range normal(seed, len(data)) {
			data[i] = source.of(x)
			exact[i] = source.value(data[i])
		}
		if s.packed {
			return data, exact, []int{appendBatch * appendRows, heads, dim}
		}
		return data, exact, []int{appendBatch, appendRows, heads, dim}
	}
	outer, inner := appendBatch, appendCapacity
	if s.paged {
		outer, inner = pageCount, pageSize
	}
	q, exactQ, shapeQ := rows(3, appendHeadsQ, appendDim)
	k, exactK, shapeK := rows(4, appendHeads, appendDim)
	v, exactV, shapeV := rows(5, appendHeads, appendDimV)
	keys := filled(outer*inner*appendHeads*appendDim, target.of(untouched))
	values := filled(outer*inner*appendHeads*appendDimV, target.of(untouched))
	used := filled(appendBatch, int32(untouched))
	a := Append{
		K: Of(k, shapeK...), V: Of(v, shapeV...), SeqUsedK: Of(used, appendBatch), Interleaved: s.interleaved,
		KCache: Of(keys, outer, inner, appendHeads, appendDim), VCache: Of(values, outer, inner, appendHeads, appendDimV),
		Offsets: Of(appendOffsets, appendBatch), SeqUsed: Of(appendUsed, appendBatch),
	}
	if s.packed {
		a.CuSeqlens = Of([]int64{0, appendRows, 2 * appendRows, 3 * appendRows, 4 * appendRows}, appendBatch+1)
	}
	if s.paged {
		a.PageTable = Of(appendPages, appendBatch, appendCapacity/pageSize)
	}
	positions := make([]int64, appendBatch*appendRows)
	for i := range positions {
		positions[i] = int64(appendOffsets[i/appendRows]) + int64(i%appendRows)
		if s.positions {
			positions[i] = int64(i * 5 % (2 * appendCapacity))
		}
	}
	rotated := filled(len(q), source.of(untouched))
	if s.rotary {
		a.RotaryCos, a.RotarySin = Of(cos, 2*appendCapacity, rotaryDim/2), Of(sin, 2*appendCapacity, rotaryDim/2)
		if s.positions {
			a.RotaryPositions = Of(positions, shapeQ[:len(shapeQ)-2]...)
		}
		if a.Q = Of(q, shapeQ...); s.inPlace {
			copy(rotated, q)
			a.Q = Of(rotated, shapeQ...)
		} else {
			a.QOut = Of(rotated, shapeQ...)
		}
	}
	descales := func(scale float32) []float32 {
		if s.rowDescales {
			return filled(outer*inner*appendHeads, float32(untouched))
		}
		x := make([]float32, appendBatch*appendHeads)
		for i := range x {
			x[i] = scale * float32(i+1) / float32(target.largest) // the smallest of them are too small for the largest rows
		}
		return x
	}
	descaleK, descaleV := descales(0.5), descales(0.75)
	if target.largest != 0 && s.rowDescales {
		a.KDescale, a.VDescale = Of(descaleK, outer, inner, appendHeads), Of(descaleV, outer, inner, appendHeads)
	} else if target.largest != 0 {
		a.KDescale, a.VDescale = Of(descaleK, appendBatch, appendHeads), Of(descaleV, appendBatch, appendHeads)
	}
	if err := ctx.PrepareAppend(a); err != nil {
		t.Fatal(err)
	}
	if plan, err := ctx.QueryAppend(a); err != nil || !strings.Contains(plan.Kernel, "append") {
		t.Fatal(plan, err)
	}
	if err := ctx.AppendKV(a); err != nil {
		t.Fatal(err)
	}

	for n := range used {
		want := int32(math.Min(float64(appendOffsets[n]+appendUsed[n]), appendCapacity))
		if appendOffsets[n] < 0 {
			want = 0
		}
		if used[n] != want {
			t.Fatalf("SeqUsedK[%d] is %d, not %d", n, used[n], want)
		}
	}
	compareCache := func(what string, cache []C, descale []float32, exact []float64, dim int, rotate bool) {
		touched, touchedDescale := make([]bool, len(cache)), make([]bool, len(descale))
		for at := 0; at < appendBatch*appendRows*appendHeads; at++ {
			h, i, n := at%appendHeads, at/appendHeads%appendRows, at/appendHeads/appendRows
			o, r, exists := s.place(n, i)
			if !exists {
				continue
			}
			row := append([]float64(nil), exact[at*dim:(at+1)*dim]...)
			if rotate {
				s.plainRotation(row, cos, sin, int(positions[n*appendRows+i]))
			}
			to, by := (o*inner+r)*appendHeads+h, 1.0
			if target.largest != 0 && s.rowDescales {
				largest := 0.0
				for _, x := range row {
					largest = math.Max(largest, math.Abs(x))
				}
				touchedDescale[to] = true
				if by = float64(descale[to]); math.Abs(by*target.largest/largest-1) > 1e-6 {
					t.Fatalf("%s: the descale of row %d, head %d of sequence %d is %v; its largest element %v", what, i, h, n, by, largest)
				}
			} else if target.largest != 0 {
				by = float64(descale[n*appendHeads+h])
			}
			for c, x := range row {
				want, got := x/by, target.value(cache[to*dim+c])
				touched[to*dim+c] = true
				if target.largest != 0 {
					want = math.Max(math.Min(want, target.largest), -target.largest)
				}
				exactly := target.largest == 0 && !(s.rotary && rotate && c < rotaryDim)
				if diff := math.Abs(got - want); exactly && diff != 0 || !(diff <= target.nearest(want)+1e-5*math.Max(1, math.Abs(want))) {
					t.Fatalf("%s: column %d of row %d, head %d of sequence %d is %v, not %v", what, c, i, h, n, got, want)
				}
			}
		}
		for i := range cache {
			if !touched[i] && cache[i] != target.of(untouched) {
				t.Fatalf("%s[%d] was written", what, i)
			}
		}
		for i := range descale {
			if s.rowDescales && !touchedDescale[i] && descale[i] != untouched {
				t.Fatalf("%s: descale %d was written", what, i)
			}
		}
	}
	compareCache("KCache", keys, descaleK, exactK, appendDim, true)
	compareCache("VCache", values, descaleV, exactV, appendDimV, false)
	for at := 0; at < len(q)/appendDim; at++ {
		i, n := at/appendHeadsQ%appendRows, at/appendHeadsQ/appendRows
		row := append([]float64(nil), exactQ[at*appendDim:(at+1)*appendDim]...)
		if written := i < int(appendUsed[n]) && appendOffsets[n] >= 0 && s.rotary; written {
			if _, _, exists := s.place(n, i); !exists {
				continue // the header leaves open what becomes of queries whose keys find no place
			}
			s.plainRotation(row, cos, sin, int(positions[n*appendRows+i]))
		} else if !s.rotary || !s.inPlace {
			row = filled(appendDim, float64(untouched))
		}
		for c, x := range row {
			if got := source.value(rotated[at*appendDim+c]); math.Abs(got-x) > source.nearest(x)+1e-5 {
				t.Fatalf("column %d of the query of row %d of sequence %d is %v, not %v", c, i, n, got, x)
			}
		}
	}
}

func TestAppendKV(t *testing.T) {
	ctx := open(t)
	for bits := 0; bits < 64; bits++ {
		is := func(bit int) bool { return bits>>bit&1 != 0 }
		s := setting{paged: is(0), packed: is(1), rotary: is(2), interleaved: is(2) && is(3), positions: is(4), inPlace: is(5)}
		t.Run(fmt.Sprintf("%+v", s), func(t *testing.T) {
			appendAndCompare(t, ctx, s, asFloat32, asFloat32)
			appendAndCompare(t, ctx, s, asBFloat16, asBFloat16)
			for _, s.rowDescales = range []bool{false, true} {
				appendAndCompare(t, ctx, s, asFloat32, asInt8)
				appendAndCompare(t, ctx, s, asBFloat16, asInt8)
				appendAndCompare(t, ctx, s, asFloat32, asFloat8)
			}
		})
	}
}

func TestAppendKVRefuses(t *testing.T) {
	ctx := open(t)
	rows, cache := Of(make([]float32, 16), 1, 1, 2, 8), Of(make([]float32, 64), 1, 4, 2, 8)
	err := ctx.AppendKV(Append{K: rows, V: rows, KCache: cache, VCache: cache})
	if !errors.Is(err, ErrInvalidArgument) || !strings.Contains(err.Error(), "own memory") {
		t.Fatal(err)
	}
	err = ctx.AppendKV(Append{K: rows, KCache: Of(make([]float32, 63), 1, 4, 2, 8)})
	if !errors.Is(err, ErrShape) || !strings.Contains(err.Error(), "KCache: ") {
		t.Fatal(err)
	}
	err = ctx.AppendKV(Append{K: rows, KCache: cache, PageTable: Of([]int32{1, 0}, 1, 2), Offsets: Of([]int64{0}, 1)})
	if !errors.Is(err, ErrDtype) || !strings.Contains(err.Error(), "offsets") {
		t.Fatal(err)
	}
	if err = ctx.AppendKV(Append{K: rows, KCache: cache, Interleaved: true}); !errors.Is(err, ErrInvalidArgument) {
		t.Fatal(err)
	}
}
