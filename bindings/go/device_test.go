// SPDX-License-Identifier: Apache-2.0

package flashattn

import (
	"errors"
	"strings"
	"syscall"
	"testing"
	"unsafe"
)

// A library without CUDA, a machine without a driver, a driver without a device: whatever is missing is an error. Where there is a GPU,
// a problem in its memory is planned for it.
func TestCUDA(t *testing.T) {
	ctx, err := New(CUDA(0))
	if err != nil {
		if !errors.Is(err, ErrNotBuilt) && !errors.Is(err, ErrDriver) && !errors.Is(err, ErrNoDevice) && !errors.Is(err, ErrArch) {
			t.Fatal(err)
		}
		t.Log(err)
	} else {
		defer ctx.Close()
		device, err := ctx.Device()
		if err != nil || !device.CUDA || device.ComputeCapability < 80 || device.Multiprocessors < 1 || device.MemoryBytes == 0 {
			t.Fatal(device, err)
		}
		rows := DeviceOf[BFloat16](1<<20, 1, 1024, 8, 128) // queries do not look whose memory it is
		plan, err := ctx.QueryForward(Attention{Q: rows, K: rows, V: rows}, DeviceOf[BFloat16](1<<30, 1, 1024, 8, 128), Tensor{})
		if err != nil || plan.Kernel == "" {
			t.Fatal(plan, err)
		}
	}
	for _, options := range [][]Option{{CUDA(-1)}, {CUDA(0), Threads(1)}, {CUDA(0), ISA(ISAPortable)}, {CUDAArch(80)}, {CUDA(0), CUDAArch(7)}} {
		if ctx, err := New(options...); err == nil {
			ctx.Close()
			t.Errorf("%d options of another device were taken", len(options))
		}
	}
}

// deviceMemory is memory that is not Go's, as a device's is not.
func deviceMemory(t *testing.T, floats int) ([]float32, uintptr) {
	bytes, err := syscall.Mmap(-1, 0, floats*4, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Munmap(bytes) })
	return unsafe.Slice((*float32)(unsafe.Pointer(&bytes[0])), floats), uintptr(unsafe.Pointer(&bytes[0]))
}

// onDevice is a context of the CPU that this package takes for one of a device: what reaches the library is then seen in the results.
func onDevice(t *testing.T) *Context {
	ctx := open(t)
	ctx.cuda = true
	return ctx
}

func TestMemoryOfADevice(t *testing.T) {
	const n = 2 * 8 * 3 * 16
	host, device := open(t), onDevice(t)
	shape := []int{2, 8, 3, 16}
	var addresses [4]uintptr
	var memory [4][]float32
	var views [4]Tensor
	for i := range memory {
		memory[i], addresses[i] = deviceMemory(t, n)
		copy(memory[i], normal(int64(i), n))
		views[i] = Of(memory[i], shape...)
	}
	out, lse := make([]float32, n), make([]float32, 2*3*8)
	want, wantLSE := Of(out, shape...), Of(lse, 2, 3, 8)
	if err := host.Forward(Attention{Q: views[0], K: views[1], V: views[2]}, want, wantLSE); err != nil {
		t.Fatal(err)
	}
	same := func(what string, got, want []float32) {
		t.Helper()
		for i := range want {
			if got[i] != want[i] {
				t.Fatalf("%s[%d] is %v, not %v", what, i, got[i], want[i])
			}
		}
	}

	on := func(i int) Tensor { return DeviceOf[float32](addresses[i], shape...) }
	onLSE, addressLSE := deviceMemory(t, 2*3*8)
	problem := Attention{Q: on(0), K: on(1), V: on(2), Deterministic: true, BatchInvariant: true, NumSplits: 2}
	result, resultLSE := on(3), DeviceOf[float32](addressLSE, 2, 3, 8)
	if err := device.PrepareForward(problem, result, resultLSE); err != nil {
		t.Fatal(err)
	}
	same("out of a problem that was only prepared", memory[3], normal(3, n))
	device.SetStream(0x1234) // which the CPU ignores
	if err := device.Forward(problem, result, resultLSE); err != nil {
		t.Fatal(err)
	}
	same("out", memory[3], out)
	same("lse", onLSE, lse)

	// The same, last row first.
	backwards := func(i int) Tensor {
		return DeviceStrided[float32](addresses[i]+7*48*4, shape, []int{8 * 48, -48, 16, 1})
	}
	if err := device.Forward(Attention{Q: backwards(0), K: on(1), V: on(2)}, backwards(3), Tensor{}); err != nil {
		t.Fatal(err)
	}
	same("out", memory[3], out)

	// Gradients, in a workspace of the caller's.
	dq, dk, dv := make([]float32, n), make([]float32, n), make([]float32, n)
	gradients := Gradients{DOut: views[0], DQ: Of(dq, shape...), DK: Of(dk, shape...), DV: Of(dv, shape...)}
	if err := host.Backward(Attention{Q: views[0], K: views[1], V: views[2]}, want, wantLSE, gradients); err != nil {
		t.Fatal(err)
	}
	var onGradients [3][]float32
	var places [3]Tensor
	for i := range places {
		var address uintptr
		onGradients[i], address = deviceMemory(t, n)
		places[i] = DeviceOf[float32](address, shape...)
	}
	gradients = Gradients{DOut: on(0), DQ: places[0], DK: places[1], DV: places[2]}
	plan, err := device.QueryBackward(problem, result, resultLSE, gradients)
	if err != nil || plan.WorkspaceBytes == 0 {
		t.Fatal(plan, err)
	}
	scratch, address := deviceMemory(t, int(plan.WorkspaceBytes/4+1))
	for _, bytes := range []int{int(plan.WorkspaceBytes) - 1, int(plan.WorkspaceBytes)} {
		if err := device.SetWorkspace(DeviceOf[uint8](address, bytes)); err != nil {
			t.Fatal(err)
		}
		err = device.Backward(problem, result, resultLSE, gradients)
		if small := bytes < int(plan.WorkspaceBytes); small != errors.Is(err, ErrWorkspace) || !small && err != nil {
			t.Fatal(bytes, err)
		}
	}
	used := false
	for _, x := range scratch {
		used = used || x != 0
	}
	if !used {
		t.Fatal("the workspace was not used")
	}
	same("dq", onGradients[0], dq)
	same("dk", onGradients[1], dk)
	same("dv", onGradients[2], dv)
	if err := device.SetWorkspace(Tensor{}); err != nil {
		t.Fatal(err)
	}
	if err := device.PrepareBackward(problem, result, resultLSE, gradients); err != nil {
		t.Fatal(err)
	}

	// Twenty equal parts, which slices could not be. Their merge is equal to each of them.
	if err := device.Forward(problem, result, resultLSE); err != nil {
		t.Fatal(err)
	}
	merged, addressMerged := deviceMemory(t, n)
	if err := device.Merge(filled(20, Part{result, resultLSE}), DeviceOf[float32](addressMerged, shape...), Tensor{}); err != nil {
		t.Fatal(err)
	}
	for i := range merged {
		if diff := merged[i] - out[i]; diff > 1e-5 || diff < -1e-5 {
			t.Fatalf("merged[%d] is %v, not %v", i, merged[i], out[i])
		}
	}

	// The keys as two new rows of a cache of ten.
	cache, addressCache := deviceMemory(t, 2*10*3*16)
	rows := DeviceStrided[float32](addresses[1], []int{2, 2, 3, 16}, []int{8 * 48, 48, 16, 1})
	if err := device.AppendKV(Append{K: rows, KCache: DeviceOf[float32](addressCache, 2, 10, 3, 16)}); err != nil {
		t.Fatal(err)
	}
	same("cache", cache[:96], memory[1][:96])
	same("cache", cache[480:576], memory[1][384:480])
	same("cache", cache[96:480], make([]float32, 384))
}

func TestMemoryOfTheOtherKind(t *testing.T) {
	host, device := open(t), onDevice(t)
	slice, address := Of(make([]float32, 48), 1, 3, 2, 8), DeviceOf[float32](4096, 1, 3, 2, 8)
	bytes := Of(make([]uint8, 64), 64)
	if d, err := host.Device(); err != nil || d.CUDA {
		t.Fatal(d, err)
	}
	for name, err := range map[string]error{
		"V: this is a slice":             device.Forward(Attention{Q: address, K: address, V: slice}, address, Tensor{}),
		"out: this is a slice":           device.Forward(Attention{Q: address, K: address, V: address}, slice, Tensor{}),
		"DOut: this is a slice":          device.Backward(Attention{Q: address, K: address, V: address}, address, address, Gradients{DOut: slice}),
		"VCache: this is a slice":        device.AppendKV(Append{K: address, V: address, KCache: address, VCache: slice}),
		"parts[0].Out: this is a slice":  device.Merge([]Part{{slice, address}}, address, Tensor{}),
		"workspace: this is a slice":     device.SetWorkspace(bytes),
		"Q: this is memory of a device":  host.Forward(Attention{Q: address, K: slice, V: slice}, slice, Tensor{}),
		"lse: this is memory of a d":     host.Forward(Attention{Q: slice, K: slice, V: slice}, slice, address),
		"KCache: this is memory of a d":  host.AppendKV(Append{K: slice, KCache: address}),
		"lse: this is memory of a dev":   host.Merge([]Part{{slice, slice}}, slice, address),
		"workspace: this is memory of a": host.SetWorkspace(DeviceOf[uint8](4096, 64)),
		"DropoutSeedAt and":              host.PrepareForward(Attention{Q: slice, K: slice, V: slice, DropoutP: 0.5, DropoutSeedAt: 8}, slice, Tensor{}),
	} {
		if !errors.Is(err, ErrInvalidArgument) || !strings.Contains(err.Error(), "ARGUMENT: "+name) {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, bad := range []Tensor{slice, Of(make([]uint8, 64), 8, 8), Strided(make([]uint8, 64), 0, []int{32}, []int{2})} {
		if err := host.SetWorkspace(bad); !errors.Is(err, ErrShape) {
			t.Error(err)
		}
	}
	if err := host.SetWorkspace(Of(make([]uint8, 0), 0)); err != nil {
		t.Error(err)
	}
	err := device.Forward(Attention{Q: DeviceOf[float32](4096, 1, -3, 2, 8), K: address, V: address}, address, Tensor{})
	if !errors.Is(err, ErrShape) || !strings.Contains(err.Error(), "Q: size -3") {
		t.Error(err)
	}
}

// Addresses of seeds reach the library: it reads them, here in memory of the CPU.
func TestSeedsOnADevice(t *testing.T) {
	const n = 64 * 2 * 8
	host, device := open(t), onDevice(t)
	memory, address := deviceMemory(t, 2*n+4)
	copy(memory, normal(1, n))
	seeds := unsafe.Slice((*uint64)(unsafe.Pointer(&memory[2*n])), 2)
	seeds[0], seeds[1] = 42, 16
	rows, out := Of(memory[:n], 1, 64, 2, 8), make([]float32, n)
	if err := host.Forward(Attention{Q: rows, K: rows, V: rows, DropoutP: 0.5, DropoutSeed: 42, DropoutOffset: 16}, Of(out, 1, 64, 2, 8),
		Tensor{}); err != nil {
		t.Fatal(err)
	}
	on := DeviceOf[float32](address, 1, 64, 2, 8)
	seed := address + 2*n*4
	if err := device.Forward(Attention{Q: on, K: on, V: on, DropoutP: 0.5, DropoutSeedAt: seed, DropoutOffsetAt: seed + 8},
		DeviceOf[float32](address+n*4, 1, 64, 2, 8), Tensor{}); err != nil {
		t.Fatal(err)
	}
	for i, x := range out {
		if memory[n+i] != x {
			t.Fatalf("out[%d] is %v, not %v", i, memory[n+i], x)
		}
	}
}
