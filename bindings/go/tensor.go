// SPDX-License-Identifier: Apache-2.0

package flashattn

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"unsafe"
)

// Float16 is the bits of a 16-bit IEEE float.
type Float16 uint16

// BFloat16 is the bits of a bfloat16.
type BFloat16 uint16

// Float8 is the bits of an 8-bit float with 4 exponent and 3 mantissa bits, for operands of forward.
type Float8 uint8

// ToBFloat16 rounds to nearest, ties to even.
func ToBFloat16(x float32) BFloat16 {
	bits := math.Float32bits(x)
	if x != x {
		return BFloat16(bits>>16 | 0x40)
	}
	return BFloat16((bits + 0x7FFF + bits>>16&1) >> 16)
}

// Float32 is exact.
func (x BFloat16) Float32() float32 { return math.Float32frombits(uint32(x) << 16) }

// ToFloat16 rounds to nearest, ties to even; what is too large becomes infinite.
func ToFloat16(x float32) Float16 {
	bits := math.Float32bits(x)
	sign, magnitude := Float16(bits>>16&0x8000), bits&0x7FFFFFFF
	switch {
	case magnitude > 0x7F800000: // NaN
		return sign | 0x7E00
	case magnitude >= 0x477FF000: // 65520 and more
		return sign | 0x7C00
	case magnitude < 0x38800000: // below the smallest normal number: a multiple of 2^-24
		return sign | Float16(math.RoundToEven(float64(math.Float32frombits(magnitude))*(1<<24)))
	}
	return sign | Float16((magnitude-0x38000000+0xFFF+magnitude>>13&1)>>13)
}

// Float32 is exact.
func (x Float16) Float32() float32 {
	sign, magnitude := uint32(x&0x8000)<<16, uint32(x&0x7FFF)
	if magnitude >= 0x7C00 {
		return math.Float32frombits(sign | 0x7F800000 | magnitude<<13)
	}
	// 2^112 moves the exponent, subnormals included.
	value := math.Float32frombits(magnitude<<13) * math.Float32frombits(239<<23)
	return math.Float32frombits(math.Float32bits(value) | sign)
}

// Element is what a tensor may hold.
type Element interface {
	float32 | Float16 | BFloat16 | Float8 | int8 | int32 | int64 | uint8 | bool
}

func dtypeOf[T Element]() C.fa_dtype {
	var element T
	switch any(element).(type) {
	case float32:
		return C.FA_FLOAT32
	case Float16:
		return C.FA_FLOAT16
	case BFloat16:
		return C.FA_BFLOAT16
	case Float8:
		return C.FA_FLOAT8_E4M3
	case int8:
		return C.FA_INT8
	case int32:
		return C.FA_INT32
	case int64:
		return C.FA_INT64
	case uint8:
		return C.FA_UINT8
	}
	return C.FA_BOOL
}

// Tensor is a view of a slice, which it keeps alive, or of memory of a device. The zero Tensor is an absent one.
type Tensor struct {
	data   unsafe.Pointer
	device bool // data is no memory of Go's
	shape  []int
	raw    C.fa_tensor // without the address
	err    error
}

func denseStrides(shape []int) []int {
	strides := make([]int, len(shape))
	step := 1
	for d := len(shape) - 1; d >= 0; d-- {
		strides[d] = step
		step *= shape[d]
	}
	return strides
}

// Of is the whole slice as a dense tensor in row-major order.
func Of[T Element](data []T, shape ...int) Tensor {
	return Strided(data, 0, shape, denseStrides(shape))
}

// Strided is the tensor whose element (0, 0, ...) is data[offset]. Strides count elements and may be zero or negative.
func Strided[T Element](data []T, offset int, shape, strides []int) Tensor {
	t, empty := describe[T](shape, strides)
	if t.err != nil || empty {
		return t
	}
	// Exact, so that products of sizes and strides that are too large are found.
	first, last := big.NewInt(int64(offset)), big.NewInt(int64(offset))
	for d, size := range shape {
		reach := new(big.Int).Mul(big.NewInt(int64(size)-1), big.NewInt(int64(strides[d])))
		if reach.Sign() < 0 {
			first.Add(first, reach)
		} else {
			last.Add(last, reach)
		}
	}
	if first.Sign() < 0 || last.Cmp(big.NewInt(int64(len(data)))) >= 0 {
		t.err = fmt.Errorf("a tensor of shape %v with strides %v at offset %d does not fit a slice of %d elements",
			shape, strides, offset, len(data))
		return t
	}
	t.data = unsafe.Pointer(&data[offset])
	return t
}

// DeviceOf is the dense tensor in row-major order at an address that the device of a CUDA context can access. The memory is not checked: it must
// be as large as the shape requires, and stay valid until the work that the calls enqueued is done.
func DeviceOf[T Element](address uintptr, shape ...int) Tensor {
	return DeviceStrided[T](address, shape, denseStrides(shape))
}

// DeviceStrided is the tensor whose element (0, 0, ...) lies at an address that the device of a CUDA context can access. See DeviceOf.
func DeviceStrided[T Element](address uintptr, shape, strides []int) Tensor {
	t, _ := describe[T](shape, strides)
	t.device = true
	t.data = pointer(address)
	return t
}

// Bits is an element mask of one bit a pair. The bytes are uint8 with four dimensions, (..., ceil(columns / 8)), those of a row adjacent; bit 0
// of a byte is the first of its 8 keys.
func Bits(bytes Tensor, columns int) Tensor {
	t := bytes
	if t.err != nil {
		return t
	}
	t.shape = append([]int(nil), bytes.shape...)
	switch {
	case t.raw.dtype != C.FA_UINT8 || t.raw.ndim != 4:
		t.err = errors.New("bits are made of uint8 with 4 dimensions")
	case columns < 0 || t.shape[3] != columns/8+(columns%8+7)/8:
		t.err = fmt.Errorf("%d columns of bits do not fit rows of %d bytes", columns, t.shape[3])
	case t.shape[3] > 1 && t.raw.stride[3] != 1:
		t.err = fmt.Errorf("the bytes of a row of bits are %d apart; they must be adjacent", t.raw.stride[3])
	}
	if t.err != nil {
		return t
	}
	t.raw.dtype = C.FA_BIT
	for d := 0; d < 3; d++ {
		t.raw.stride[d] *= 8
	}
	t.shape[3], t.raw.shape[3], t.raw.stride[3] = columns, C.int64_t(columns), 1
	return t
}

// pointer is for addresses that the garbage collector does not know, and therefore leaves alone.
func pointer(address uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&address)) }

// describe is a tensor without its memory, and whether it has no elements.
func describe[T Element](shape, strides []int) (t Tensor, empty bool) {
	t.shape = append([]int(nil), shape...)
	if len(shape) != len(strides) || len(shape) == 0 || len(shape) > 4 {
		t.err = fmt.Errorf("%d sizes and %d strides; both must be the same, 1 to 4", len(shape), len(strides))
		return t, false
	}
	t.raw.dtype = dtypeOf[T]()
	t.raw.ndim = C.int32_t(len(shape))
	for d, size := range shape {
		if size < 0 {
			t.err = fmt.Errorf("size %d of dimension %d is negative", size, d)
			return t, false
		}
		empty = empty || size == 0
		t.raw.shape[d], t.raw.stride[d] = C.int64_t(size), C.int64_t(strides[d])
	}
	return t, empty
}

// Shape is the sizes, outermost first.
func (t Tensor) Shape() []int { return append([]int(nil), t.shape...) }

func (t *Tensor) absent() bool { return t.raw.ndim == 0 && t.err == nil }

type named struct {
	name   string
	tensor *Tensor
	place  *C.fa_tensor
}

// fill writes views without addresses. It reports the first that does not fit its slice, or is not of the memory that the context works on.
func (ctx *Context) fill(tensors []named) error {
	for _, t := range tensors {
		text := ""
		switch {
		case t.tensor.err != nil:
			return &Error{Status: ErrShape, Text: t.name + ": " + t.tensor.err.Error()}
		case t.tensor.absent() || t.tensor.device == ctx.cuda:
			*t.place = t.tensor.raw
			continue
		case ctx.cuda:
			text = "this is a slice; a context of a CUDA device takes memory of the device (DeviceOf, DeviceStrided)"
		default:
			text = "this is memory of a device; a context of the CPU takes slices (Of, Strided)"
		}
		return &Error{Status: ErrInvalidArgument, Text: t.name + ": " + text}
	}
	return nil
}
