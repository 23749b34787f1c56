// SPDX-License-Identifier: Apache-2.0

package flashattn

import (
	"errors"
	"math"
	"math/rand"
	"os"
	"os/exec"
	"runtime"
	"sort"
	"strings"
	"sync"
	"testing"
)

func open(t testing.TB, options ...Option) *Context {
	t.Helper()
	ctx, err := New(options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ctx.Close() })
	return ctx
}

func normal(seed int64, n int) []float32 {
	random, x := rand.New(rand.NewSource(seed)), make([]float32, n)
	for i := range x {
		x[i] = float32(random.NormFloat64())
	}
	return x
}

type sizes struct{ batch, rowsQ, rowsK, headsQ, headsK, dim int }

// reference is attention, its gradients and each head's largest logit by definition, in float64, of dense tensors; visible says which pairs take
// part.
func reference(s sizes, q, k, v, dout []float32, visible func(b, i, j int) bool) (out, lse, dq, dk, dv, top []float64) {
	rows, keys := s.batch*s.rowsQ*s.headsQ*s.dim, s.batch*s.rowsK*s.headsK*s.dim
	out, dq, dk, dv = make([]float64, rows), make([]float64, rows), make([]float64, keys), make([]float64, keys)
	lse = make([]float64, s.batch*s.headsQ*s.rowsQ)
	for h := 0; h < s.headsQ; h++ {
		top = append(top, math.Inf(-1))
	}
	scale := 1 / math.Sqrt(float64(s.dim))
	p, dp := make([]float64, s.rowsK), make([]float64, s.rowsK)
	for b := 0; b < s.batch; b++ {
		for h := 0; h < s.headsQ; h++ {
			for i := 0; i < s.rowsQ; i++ {
				at := ((b*s.rowsQ+i)*s.headsQ + h) * s.dim
				key := func(j int) int { return ((b*s.rowsK+j)*s.headsK + h/(s.headsQ/s.headsK)) * s.dim }
				total := 0.0
				for j := range p {
					x := 0.0
					for d := 0; d < s.dim; d++ {
						x += float64(q[at+d]) * float64(k[key(j)+d])
					}
					if p[j] = 0; visible(b, i, j) {
						p[j], top[h] = math.Exp(scale*x), math.Max(top[h], scale*x)
					}
					total += p[j]
				}
				lse[(b*s.headsQ+h)*s.rowsQ+i] = math.Log(total)
				delta := 0.0
				for j := range p {
					if total > 0 {
						p[j] /= total
					}
					dp[j] = 0
					for d := 0; d < s.dim; d++ {
						out[at+d] += p[j] * float64(v[key(j)+d])
						dp[j] += float64(dout[at+d]) * float64(v[key(j)+d])
						dv[key(j)+d] += p[j] * float64(dout[at+d])
					}
					delta += p[j] * dp[j]
				}
				for j := range p {
					ds := p[j] * (dp[j] - delta) * scale
					for d := 0; d < s.dim; d++ {
						dq[at+d] += ds * float64(k[key(j)+d])
						dk[key(j)+d] += ds * float64(q[at+d])
					}
				}
			}
		}
	}
	return
}

func near(t *testing.T, what string, got []float32, want []float64, tolerance float64) {
	t.Helper()
	for i := range want {
		if math.IsInf(want[i], -1) && math.IsInf(float64(got[i]), -1) {
			continue
		}
		if diff := math.Abs(float64(got[i]) - want[i]); !(diff <= tolerance*math.Max(1, math.Abs(want[i]))) {
			t.Fatalf("%s[%d] is %v, not %v", what, i, got[i], want[i])
		}
	}
}

func TestForwardAndBackward(t *testing.T) {
	s := sizes{2, 19, 27, 4, 2, 16}
	rows, keys := s.batch*s.rowsQ*s.headsQ*s.dim, s.batch*s.rowsK*s.headsK*s.dim
	q, k, v, dout := normal(1, rows), normal(2, keys), normal(3, keys), normal(4, rows)
	shapeQ, shapeK := []int{s.batch, s.rowsQ, s.headsQ, s.dim}, []int{s.batch, s.rowsK, s.headsK, s.dim}
	shift := s.rowsK - s.rowsQ
	random, rowBytes := rand.New(rand.NewSource(5)), (s.rowsK+7)/8
	pairs, bits := make([]bool, s.rowsQ*s.rowsK), make([]uint8, s.rowsQ*rowBytes)
	for n := range pairs {
		if i, j := n/s.rowsK, n%s.rowsK; random.Intn(2) == 0 {
			pairs[n] = true
			bits[i*rowBytes+j/8] |= 1 << (j % 8)
		}
	}
	for name, c := range map[string]struct {
		change  func(*Attention)
		visible func(b, i, j int) bool
	}{
		"full":            {func(*Attention) {}, func(b, i, j int) bool { return true }},
		"causal":          {func(a *Attention) { a.Mask = Causal }, func(b, i, j int) bool { return j <= i+shift }},
		"causal top left": {func(a *Attention) { a.Mask = CausalTopLeft }, func(b, i, j int) bool { return j <= i }},
		"window": {func(a *Attention) { a.WindowLeft, a.WindowRight = Limit(5), Limit(0) },
			func(b, i, j int) bool { return j >= i+shift-5 && j <= i+shift }},
		"element mask": {func(a *Attention) { a.ElementMask = Of(pairs, 1, 1, s.rowsQ, s.rowsK) },
			func(b, i, j int) bool { return pairs[i*s.rowsK+j] }},
		"bits": {func(a *Attention) { a.ElementMask = Bits(Of(bits, 1, 1, s.rowsQ, rowBytes), s.rowsK) },
			func(b, i, j int) bool { return pairs[i*s.rowsK+j] }},
		"left padding": {func(a *Attention) { a.SeqStartK = Of([]int32{3, 20}, 2) },
			func(b, i, j int) bool { return j >= []int{3, 20}[b] }},
		"slices": {func(a *Attention) {
			a.Slices = Of([]int32{0, 9, 2, 12, SliceFull, 5, 19, 0, 10, SliceCausal, 0, 6, 20, 27, SliceInverseCausal, 10, 16, 12, 20,
				SliceBothCausal}, 4, 5)
		}, func(b, i, j int) bool {
			in := func(q0, q1, k0, k1 int) bool { return i >= q0 && i < q1 && j >= k0 && j < k1 }
			return in(0, 9, 2, 12) || in(5, 19, 0, 10) && j <= i-9 || in(0, 6, 20, 27) && j >= i+20 ||
				in(10, 16, 12, 20) && j <= i+4 && j >= i+2
		}},
		"block lists": {func(a *Attention) {
			a.BlockCounts, a.BlockIndices = Of([]int32{1, 2}, 1, 1, 2), Of([]int32{2, 9, 1, 0}, 1, 1, 2, 2)
			a.BlockSizeQ, a.BlockSizeK = 10, 10
		}, func(b, i, j int) bool { return (i < 10) == (j >= 20) }},
		"block mask": {func(a *Attention) {
			a.BlockMask, a.BlockSizeQ, a.BlockSizeK = Of([]bool{true, false}, 1, 1, 1, 2), 19, 20
		}, func(b, i, j int) bool { return j < 20 }},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := open(t)
			out, lse := make([]float32, rows), make([]float32, s.batch*s.headsQ*s.rowsQ)
			dq, dk, dv := make([]float32, rows), make([]float32, keys), make([]float32, keys)
			top := []float32{float32(math.NaN()), 0, -100, 100} // all of them are written
			problem := Attention{Q: Of(q, shapeQ...), K: Of(k, shapeK...), V: Of(v, shapeK...), MaxLogit: Of(top, s.headsQ)}
			c.change(&problem)
			o, l := Of(out, shapeQ...), Of(lse, s.batch, s.headsQ, s.rowsQ)
			if err := ctx.Forward(problem, o, l); err != nil {
				t.Fatal(err)
			}
			g := Gradients{DOut: Of(dout, shapeQ...), DQ: Of(dq, shapeQ...), DK: Of(dk, shapeK...), DV: Of(dv, shapeK...)}
			if err := ctx.Backward(problem, o, l, g); err != nil {
				t.Fatal(err)
			}
			wantOut, wantLse, wantDq, wantDk, wantDv, wantTop := reference(s, q, k, v, dout, c.visible)
			near(t, "out", out, wantOut, 1e-5)
			near(t, "lse", lse, wantLse, 1e-5)
			near(t, "dq", dq, wantDq, 5e-5)
			near(t, "dk", dk, wantDk, 5e-5)
			near(t, "dv", dv, wantDv, 5e-5)
			near(t, "max logit", top, wantTop, 1e-5)
			forward, err := ctx.QueryForward(problem, o, l)
			backward, errBackward := ctx.QueryBackward(problem, o, l, g)
			if err != nil || errBackward != nil || !strings.HasPrefix(forward.Kernel, "cpu_") || backward.Flops <= forward.Flops {
				t.Fatal(forward, backward, err, errBackward)
			}
		})
	}
}

func TestPackedSequencesAndSink(t *testing.T) {
	ctx := open(t, Threads(2))
	starts := []int32{0, 5, 12}
	q := normal(1, 12*2*8)
	out, one := make([]float32, len(q)), make([]float32, len(q))
	sink := Of([]float32{0.5, -1}, 2)
	view := Of(q, 12, 2, 8)
	packed := Attention{Q: view, K: view, V: view, CuSeqlensQ: Of(starts, 3), CuSeqlensK: Of(starts, 3), MaxSeqlenQ: 7, MaxSeqlenK: 7,
		Mask: Causal, Sink: sink}
	if err := ctx.Forward(packed, Of(out, 12, 2, 8), Tensor{}); err != nil {
		t.Fatal(err)
	}
	for n := 0; n < 2; n++ {
		a, b := int(starts[n]), int(starts[n+1])
		rows := Of(q[a*16:b*16], 1, b-a, 2, 8)
		if err := ctx.Forward(Attention{Q: rows, K: rows, V: rows, Mask: Causal, Sink: sink}, Of(one[a*16:b*16], 1, b-a, 2, 8), Tensor{}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range out {
		if math.Abs(float64(out[i]-one[i])) > 1e-6 {
			t.Fatalf("out[%d]: packed %v, alone %v", i, out[i], one[i])
		}
	}
}

func TestStridesAndHalfPrecision(t *testing.T) {
	ctx := open(t)
	packed := make([]BFloat16, 1*6*3*2*8) // (batch, rows, 3, heads, head_dim)
	for i, x := range normal(1, len(packed)) {
		packed[i] = ToBFloat16(x)
	}
	part := func(n int) Tensor { return Strided(packed, n*16, []int{1, 6, 2, 8}, []int{288, 48, 8, 1}) }
	out := make([]BFloat16, 96)
	if err := ctx.Forward(Attention{Q: part(0), K: part(1), V: part(2)}, Of(out, 1, 6, 2, 8), Tensor{}); err != nil {
		t.Fatal(err)
	}
	dense := func(n int) []float32 {
		x := make([]float32, 96)
		for i := range x {
			x[i] = packed[i/16*48+n*16+i%16].Float32()
		}
		return x
	}
	want, _, _, _, _, _ := reference(sizes{1, 6, 6, 2, 2, 8}, dense(0), dense(1), dense(2), make([]float32, 96), func(b, i, j int) bool { return true })
	got := make([]float32, 96)
	for i := range got {
		got[i] = out[i].Float32()
	}
	near(t, "out", got, want, 1e-2)
	// Backwards through the rows of V, last first.
	reversed := Strided(packed, 5*48+32, []int{1, 6, 2, 8}, []int{288, -48, 8, 1})
	if err := ctx.Forward(Attention{Q: part(0), K: part(1), V: reversed}, Of(out, 1, 6, 2, 8), Tensor{}); err != nil {
		t.Fatal(err)
	}
}

func TestKeysInInt8(t *testing.T) {
	ctx := open(t)
	s := sizes{1, 3, 4, 1, 1, 8}
	q, bytes, descales := normal(1, 24), make([]int8, 32), []float32{0.5, 0.25, 1, 2}
	exact := make([]float32, 32)
	for i := range bytes {
		bytes[i] = int8(i*37%21 - 10)
		exact[i] = float32(bytes[i]) * descales[i/8]
	}
	keys, descale, out := Of(bytes, 1, 4, 1, 8), Of(descales, 1, 4, 1), make([]float32, 24)
	problem := Attention{Q: Of(q, 1, 3, 1, 8), K: keys, V: keys, KDescale: descale, VDescale: descale}
	if err := ctx.Forward(problem, Of(out, 1, 3, 1, 8), Tensor{}); err != nil {
		t.Fatal(err)
	}
	want, _, _, _, _, _ := reference(s, q, exact, exact, make([]float32, 24), func(b, i, j int) bool { return true })
	near(t, "out", out, want, 1e-5)
}

func TestHalfNumbers(t *testing.T) {
	for bits := 0; bits < 1<<16; bits++ {
		half, brain := Float16(bits), BFloat16(bits)
		if x := half.Float32(); x == x && ToFloat16(x) != half {
			t.Fatalf("Float16 %#x becomes %v and %#x", bits, x, ToFloat16(x))
		}
		if x := brain.Float32(); x == x && ToBFloat16(x) != brain {
			t.Fatalf("BFloat16 %#x becomes %v and %#x", bits, x, ToBFloat16(x))
		}
	}
	nan := float32(math.NaN())
	for _, x := range []float32{ToFloat16(nan).Float32(), ToBFloat16(nan).Float32()} {
		if x == x {
			t.Fatal("NaN became a number")
		}
	}
	for x, want := range map[float32]Float16{65519: 0x7BFF, 65520: 0x7C00, 1 + 1.0/2048: 0x3C00, 1 + 3.0/2048: 0x3C02, 1.0 / (1 << 25): 0} {
		if got := ToFloat16(x); got != want {
			t.Errorf("ToFloat16(%v) is %#x, not %#x", x, got, want)
		}
	}
}

func TestRefusals(t *testing.T) {
	ctx := open(t)
	q := Of(make([]float32, 48), 1, 3, 2, 8)
	out := Of(make([]float32, 48), 1, 3, 2, 8)
	err := ctx.Forward(Attention{Q: q, K: Of(make([]float32, 24), 1, 3, 2, 4), V: q}, out, Tensor{})
	var e *Error
	if !errors.Is(err, ErrShape) || !errors.As(err, &e) || !strings.Contains(e.Text, "k.shape[3] is 4") {
		t.Fatal(err)
	}
	if ErrShape.String() != "FA_ERROR_SHAPE" || ErrShape.Error() == "" || errors.Is(err, ErrDtype) {
		t.Fatal(ErrShape)
	}
	for name, bad := range map[string]Tensor{
		"shape [1 3 2 9] with strides [54 18 9 1] at offset 0 does not fit a slice of 48": Of(make([]float32, 48), 1, 3, 2, 9),
		"at offset 1 does not fit":    Strided(make([]float32, 48), 1, []int{48}, []int{1}),
		"2 sizes and 1 strides":       Strided(make([]float32, 48), 0, []int{4, 12}, []int{1}),
		"size -1":                     Of(make([]float32, 48), -1, 3, 2, 8),
		"does not fit a slice of 4 e": Strided(make([]float32, 4), 0, []int{math.MaxInt, 3}, []int{math.MaxInt, 1}),
		"with strides [-1] at offset": Strided(make([]float32, 4), 0, []int{2}, []int{-1}),
	} {
		err := ctx.Forward(Attention{Q: q, K: bad, V: q}, out, Tensor{})
		if !errors.Is(err, ErrShape) || !strings.Contains(err.Error(), "flashattn: FA_ERROR_SHAPE: K: ") || !strings.Contains(err.Error(), name) {
			t.Errorf("%q: %v", name, err)
		}
	}
	bytes := make([]uint8, 12)
	for name, mask := range map[string]Tensor{
		"20 columns of bits do not fit rows of 2": Bits(Of(bytes, 1, 1, 3, 2), 20),
		"-1 columns of bits":                      Bits(Of(bytes, 1, 1, 3, 0), -1),
		"uint8 with 4 dimensions":                 Bits(Of(bytes, 3, 4), 32),
		"bits are made of uint8":                  Bits(Of(make([]bool, 12), 1, 1, 3, 4), 32),
		"a row of bits are 2 apart":               Bits(Strided(bytes, 0, []int{1, 1, 3, 2}, []int{12, 12, 4, 2}), 16),
		"[1 1 9 2] with strides":                  Bits(Of(bytes, 1, 1, 9, 2), 16),
	} {
		err := ctx.Forward(Attention{Q: q, K: q, V: q, ElementMask: mask}, out, Tensor{})
		if !errors.Is(err, ErrShape) || !strings.Contains(err.Error(), "ElementMask: ") || !strings.Contains(err.Error(), name) {
			t.Errorf("%q: %v", name, err)
		}
	}
	if _, err := New(Threads(-1)); !errors.Is(err, ErrInvalidArgument) {
		t.Fatal(err)
	}
	if _, err := ctx.QueryForward(Attention{Q: q, K: q, V: q, Softcap: -1}, out, Tensor{}); !errors.Is(err, ErrInvalidArgument) {
		t.Fatal(err)
	}
	ctx.Close()
	ctx.Close()
	if err := ctx.Forward(Attention{Q: q, K: q, V: q}, out, Tensor{}); err == nil {
		t.Fatal("a closed context computed something")
	}
}

func TestKeysByIndex(t *testing.T) {
	s := sizes{2, 19, 27, 4, 2, 16}
	rows, keys := s.batch*s.rowsQ*s.headsQ*s.dim, s.batch*s.rowsK*s.headsK*s.dim
	q, k, v := normal(1, rows), normal(2, keys), normal(3, keys)
	shapeQ, shapeK := []int{s.batch, s.rowsQ, s.headsQ, s.dim}, []int{s.batch, s.rowsK, s.headsK, s.dim}
	visible := func(b, i, j int) bool { return (i+3*j+b)%4 == 0 }
	lists := make([]int32, s.batch*s.rowsQ*s.rowsK)
	for n := range lists {
		lists[n] = -1
		if j := n % s.rowsK; visible(n/s.rowsK/s.rowsQ, n/s.rowsK%s.rowsQ, j) {
			lists[n] = int32(j)
		}
	}
	ctx, out := open(t), make([]float32, rows)
	problem := Attention{Q: Of(q, shapeQ...), K: Of(k, shapeK...), V: Of(v, shapeK...), KVIndices: Of(lists, s.batch, s.rowsQ, s.rowsK)}
	if err := ctx.Forward(problem, Of(out, shapeQ...), Tensor{}); err != nil {
		t.Fatal(err)
	}
	want, _, _, _, _, _ := reference(s, q, k, v, make([]float32, rows), visible)
	near(t, "out", out, want, 1e-5)
	problem.Mask = Causal
	if err := ctx.Forward(problem, Of(out, shapeQ...), Tensor{}); !errors.Is(err, ErrUnsupported) {
		t.Fatal(err)
	}
}

func TestGoroutinesWithContextsOfTheirOwn(t *testing.T) {
	const n = 64 * 2 * 16
	q := normal(1, n)
	run := func(ctx *Context) []float32 {
		out := make([]float32, n)
		if err := ctx.Forward(Attention{Q: Of(q, 1, 64, 2, 16), K: Of(q, 1, 64, 2, 16), V: Of(q, 1, 64, 2, 16)}, Of(out, 1, 64, 2, 16), Tensor{}); err != nil {
			t.Error(err)
		}
		return out
	}
	want := run(open(t))
	var wait sync.WaitGroup
	for g := 0; g < 4; g++ {
		wait.Add(1)
		go func() {
			defer wait.Done()
			ctx, err := New(Threads(1))
			if err != nil {
				t.Error(err)
				return
			}
			for i := 0; i < 20; i++ {
				runtime.GC() // moves and frees what nothing holds
				for j, x := range run(ctx) {
					if x != want[j] {
						t.Errorf("differs at %d", j)
						return
					}
				}
			}
		}() // the context is left to its finalizer
	}
	wait.Wait()
}

func TestDeviceAndVersion(t *testing.T) {
	device, err := open(t, Threads(1), ISA(ISAPortable)).Device()
	if err != nil || device.Threads != 1 || device.ISA != ISAPortable || device.Name == "" || device.MemoryBytes == 0 {
		t.Fatal(device, err)
	}
	if !strings.Contains(BuildInfo(), "version="+Version()) {
		t.Fatal(BuildInfo())
	}
}

// FLASHATTN_LAYOUT is a program, generated from flashattn.h, that prints `struct size` and `struct.field offset size` lines.
func TestLayout(t *testing.T) {
	program := os.Getenv("FLASHATTN_LAYOUT")
	if program == "" {
		t.Skip("FLASHATTN_LAYOUT is not set")
	}
	printed, err := exec.Command(program).Output()
	if err != nil {
		t.Fatal(err)
	}
	theirs, ours := strings.Split(strings.TrimSpace(string(printed)), "\n"), layouts()
	sort.Strings(theirs)
	sort.Strings(ours)
	if strings.Join(ours, "\n") != strings.Join(theirs, "\n") {
		t.Fatalf("this package:\n%s\nflashattn.h:\n%s", strings.Join(ours, "\n"), strings.Join(theirs, "\n"))
	}
}

// Every field of the structs is reached from Go, or named here as left out.
func TestEveryFieldIsWrapped(t *testing.T) {
	leftOut := map[string]string{
		"fa_config.parallel_for":         "a callback into Go",
		"fa_config.parallel_for_user":    "its argument",
		"fa_config.log":                  "a callback into Go",
		"fa_config.log_user":             "its argument",
		"fa_config.kernel_cache":         "for score",
		"fa_attention.score":             "callbacks into Go",
		"fa_attention.score_tensors":     "for score",
		"fa_attention.num_score_tensors": "for score",
		"fa_attention.score_reserved":    "for score",
		"fa_attention.score_scalars":     "for score",
		"fa_plan_info.status":            "the error of the query",
	}
	for prefix, in := range map[string]struct{ file, variable string }{
		"fa_attention": {"attention.go", "raw."}, "fa_gradients": {"attention.go", "gradients."}, "fa_append": {"append.go", "raw."},
		"fa_plan_info": {"attention.go", "info."}, "fa_config": {"context.go", "c."}, "fa_device_properties": {"context.go", "p."},
	} {
		source, err := os.ReadFile(in.file)
		if err != nil {
			t.Fatal(err)
		}
		fields := 0
		for _, line := range layouts() {
			name := strings.Fields(line)[0]
			struct_, field, isField := strings.Cut(name, ".")
			if !isField || struct_ != prefix || leftOut[name] != "" || field == "reserved" || field == "struct_size" {
				continue
			}
			fields++
			if !strings.Contains(string(source), in.variable+field) {
				t.Errorf("%s is neither set by this package nor listed as left out", name)
			}
		}
		if fields == 0 {
			t.Errorf("%s has no fields", prefix)
		}
	}
}

func BenchmarkForward(b *testing.B) {
	ctx := open(b)
	q := normal(1, 1024*8*64)
	view, out := Of(q, 1, 1024, 8, 64), Of(make([]float32, len(q)), 1, 1024, 8, 64)
	for i := 0; i < b.N; i++ {
		if err := ctx.Forward(Attention{Q: view, K: view, V: view}, out, Tensor{}); err != nil {
			b.Fatal(err)
		}
	}
}
