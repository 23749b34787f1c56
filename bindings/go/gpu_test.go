// SPDX-License-Identifier: Apache-2.0

package flashattn

import (
	"math"
	"runtime"
	"testing"

	"flashattn/internal/driver"
)

// A step over a cache, forward and backward in memory of a GPU, against the same on the CPU.
func TestOnGPU(t *testing.T) {
	ctx, err := New(CUDA(0))
	if err != nil {
		t.Skip(err)
	}
	defer ctx.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := driver.Open(); err != nil {
		t.Fatal(err)
	}
	stream := driver.NewStream()
	ctx.SetStream(stream)
	host := open(t)

	const rows, heads, dim = 70, 2, 64
	const n = rows * heads * dim
	shape, shapeLSE := []int{1, rows, heads, dim}, []int{1, heads, rows}
	numbers := func(seed int64) []BFloat16 {
		x := make([]BFloat16, n)
		for i, number := range normal(seed, n) {
			x[i] = ToBFloat16(number)
		}
		return x
	}
	q, k, v, dout := numbers(1), numbers(2), numbers(3), numbers(4)
	on := func(x []BFloat16) Tensor { return DeviceOf[BFloat16](driver.Copy(x), shape...) }
	floats := func(x []BFloat16) []float32 {
		y := make([]float32, len(x))
		for i := range x {
			y[i] = x[i].Float32()
		}
		return y
	}
	same := func(what string, got, want []float32) {
		t.Helper()
		for i := range want {
			if !(math.Abs(float64(got[i]-want[i])) <= 0.03*math.Max(1, math.Abs(float64(want[i])))) {
				t.Fatalf("%s[%d] is %v, on the CPU %v", what, i, got[i], want[i])
			}
		}
	}

	// Forward and backward, in a workspace of the caller's.
	problem := Attention{Q: Of(q, shape...), K: Of(k, shape...), V: Of(v, shape...), Mask: Causal}
	out, lse := make([]BFloat16, n), make([]float32, heads*rows)
	grads := [3][]BFloat16{make([]BFloat16, n), make([]BFloat16, n), make([]BFloat16, n)}
	gradients := Gradients{DOut: Of(dout, shape...), DQ: Of(grads[0], shape...), DK: Of(grads[1], shape...), DV: Of(grads[2], shape...)}
	if err := host.Forward(problem, Of(out, shape...), Of(lse, shapeLSE...)); err != nil {
		t.Fatal(err)
	}
	if err := host.Backward(problem, Of(out, shape...), Of(lse, shapeLSE...), gradients); err != nil {
		t.Fatal(err)
	}
	zeros := make([]BFloat16, n)
	var addresses [4]uintptr
	for i := range addresses {
		addresses[i] = driver.Copy(zeros)
	}
	at := func(i int) Tensor { return DeviceOf[BFloat16](addresses[i], shape...) }
	addressLSE := driver.Copy(make([]float32, heads*rows))
	onLSE := DeviceOf[float32](addressLSE, shapeLSE...)
	onProblem := Attention{Q: on(q), K: on(k), V: on(v), Mask: Causal, Deterministic: true}
	onGradients := Gradients{DOut: on(dout), DQ: at(1), DK: at(2), DV: at(3)}
	forward, err := ctx.QueryForward(onProblem, at(0), onLSE)
	if err != nil {
		t.Fatal(err)
	}
	backward, err := ctx.QueryBackward(onProblem, at(0), onLSE, onGradients)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(forward.Kernel, backward.Kernel)
	bytes := int(forward.WorkspaceBytes + backward.WorkspaceBytes)
	if err := ctx.SetWorkspace(DeviceOf[uint8](driver.Alloc(bytes+256), bytes)); err != nil {
		t.Fatal(err)
	}
	if err := ctx.PrepareForward(onProblem, at(0), onLSE); err != nil {
		t.Fatal(err)
	}
	if err := ctx.PrepareBackward(onProblem, at(0), onLSE, onGradients); err != nil {
		t.Fatal(err)
	}
	if err := ctx.Forward(onProblem, at(0), onLSE); err != nil {
		t.Fatal(err)
	}
	if err := ctx.Backward(onProblem, at(0), onLSE, onGradients); err != nil {
		t.Fatal(err)
	}
	driver.Wait(stream)
	got, gotLSE := make([]BFloat16, n), make([]float32, heads*rows)
	driver.Read(gotLSE, addressLSE)
	same("lse", gotLSE, lse)
	for i, want := range [][]BFloat16{out, grads[0], grads[1], grads[2]} {
		driver.Read(got, addresses[i])
		same([]string{"out", "dq", "dk", "dv"}[i], floats(got), floats(want))
	}

	// The keys as new rows of a cache, after 10 others, bit for bit; and a part merged with itself, which is that part.
	const capacity = 128
	addressCache := driver.Copy(make([]BFloat16, capacity*heads*dim))
	addressUsed := driver.Copy([]int32{0})
	err = ctx.AppendKV(Append{
		K: onProblem.K, KCache: DeviceOf[BFloat16](addressCache, 1, capacity, heads, dim),
		Offsets: DeviceOf[int32](driver.Copy([]int32{10}), 1), SeqUsedK: DeviceOf[int32](addressUsed, 1),
	})
	if err != nil {
		t.Fatal(err)
	}
	part := Part{at(0), onLSE}
	if err := ctx.Merge([]Part{part, part}, at(1), Tensor{}); err != nil {
		t.Fatal(err)
	}
	driver.Wait(stream)
	cache, used := make([]BFloat16, capacity*heads*dim), []int32{0}
	driver.Read(cache, addressCache)
	driver.Read(used, addressUsed)
	if used[0] != 10+rows {
		t.Fatal(used)
	}
	for i, x := range cache {
		want := BFloat16(0)
		if row := i / (heads * dim); row >= 10 && row < 10+rows {
			want = k[i-10*heads*dim]
		}
		if x != want {
			t.Fatalf("cache[%d] is %v, not %v", i, x.Float32(), want.Float32())
		}
	}
	driver.Read(got, addresses[1])
	same("merged", floats(got), floats(out))
}
