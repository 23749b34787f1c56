// SPDX-License-Identifier: Apache-2.0

package flashattn_test

import (
	"fmt"

	"flashattn"
)

// attend takes addresses of memory of a GPU, from cudaMalloc for example, and a cudaStream_t.
func attend(q, k, v, out, stream uintptr) error {
	ctx, err := flashattn.New(flashattn.CUDA(0))
	if err != nil {
		return err // no GPU, no driver, or a library without CUDA: errors.Is tells
	}
	defer ctx.Close() // work on the stream still completes
	ctx.SetStream(stream)
	rows := func(address uintptr) flashattn.Tensor {
		return flashattn.DeviceOf[flashattn.BFloat16](address, 1, 1024, 8, 128)
	}
	problem := flashattn.Attention{Q: rows(q), K: rows(k), V: rows(v), Mask: flashattn.Causal}
	return ctx.Forward(problem, rows(out), flashattn.Tensor{})
}

func ExampleCUDA() {
	fmt.Println(attend(0, 0, 0, 0, 0) != nil) // there is nothing at these addresses
	// Output: true
}
