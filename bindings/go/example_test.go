// SPDX-License-Identifier: Apache-2.0

package flashattn_test

import (
	"fmt"
	"log"

	"flashattn"
)

func Example() {
	ctx, err := flashattn.New()
	if err != nil {
		log.Fatal(err)
	}
	defer ctx.Close()

	shape := []int{1, 128, 4, 64} // batch, rows, heads, head_dim
	q := make([]float32, 128*4*64)
	for i := range q {
		q[i] = 0.5
	}
	out := make([]float32, len(q))
	problem := flashattn.Attention{
		Q:    flashattn.Of(q, shape...),
		K:    flashattn.Of(q, shape...),
		V:    flashattn.Of(q, shape...),
		Mask: flashattn.Causal,
	}
	if err := ctx.Forward(problem, flashattn.Of(out, shape...), flashattn.Tensor{}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(out[0])
	// Output: 0.5
}
