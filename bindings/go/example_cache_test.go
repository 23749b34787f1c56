// SPDX-License-Identifier: Apache-2.0

package flashattn_test

import (
	"fmt"
	"log"

	"flashattn"
)

func ExampleContext_AppendKV() {
	ctx, err := flashattn.New()
	if err != nil {
		log.Fatal(err)
	}
	defer ctx.Close()

	const batch, heads, dim, pages, pageSize = 2, 4, 64, 8, 16
	cache := func() flashattn.Tensor {
		return flashattn.Of(make([]float32, pages*pageSize*heads*dim), pages, pageSize, heads, dim)
	}
	row := func(x float32) flashattn.Tensor {
		data := make([]float32, batch*heads*dim)
		for i := range data {
			data[i] = x
		}
		return flashattn.Of(data, batch, 1, heads, dim)
	}
	keys, values := cache(), cache()
	table := flashattn.Of([]int32{6, 1, 3, 4}, batch, 2) // two pages per sequence
	lengths := make([]int32, batch)

	// A new row for each sequence: the first has 20 already, the second none.
	step := flashattn.Append{
		K: row(0.5), V: row(2), KCache: keys, VCache: values, PageTable: table,
		Offsets: flashattn.Of([]int32{20, 0}, batch), SeqUsedK: flashattn.Of(lengths, batch),
	}
	if err := ctx.AppendKV(step); err != nil {
		log.Fatal(err)
	}
	out := make([]float32, batch*heads*dim)
	problem := flashattn.Attention{Q: row(1), K: keys, V: values, PageTable: table, SeqUsedK: step.SeqUsedK}
	if err := ctx.Forward(problem, flashattn.Of(out, batch, 1, heads, dim), flashattn.Tensor{}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(lengths, out[heads*dim])
	// Output: [21 1] 2
}
