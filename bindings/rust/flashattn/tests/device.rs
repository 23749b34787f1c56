// SPDX-License-Identifier: Apache-2.0
//! The way to GPUs: what is refused where there is none, and, on memory of the CPU, that addresses, stream and workspace reach the library.

use std::ffi::c_void;
use std::ptr::null_mut;

use flashattn::{Attention, Context, CudaSettings, Gradients, TensorView, TensorViewMut};

const SHAPE: [usize; 4] = [2, 8, 3, 16];
const COUNT: usize = 2 * 8 * 3 * 16;

#[test]
fn a_gpu_or_a_reason() {
    // SAFETY: nothing is computed there.
    match unsafe { Context::cuda(CudaSettings::default()) } {
        Ok(context) => {
            let device = context.device().unwrap();
            assert!(device.cuda && device.compute_capability >= 80 && device.multiprocessors > 0, "{:?}", device);
        }
        Err(error) => {
            let reasons = ["FA_ERROR_NOT_BUILT", "FA_ERROR_DRIVER", "FA_ERROR_NO_DEVICE", "FA_ERROR_ARCH"];
            assert!(reasons.contains(&error.name()) && error.cuda_error() == 0, "{}", error);
        }
    }
    for settings in [CudaSettings { device: u32::MAX, arch: 0 }, CudaSettings { device: 0, arch: u32::MAX }] {
        // SAFETY: there is no such device.
        assert_eq!(unsafe { Context::cuda(settings) }.unwrap_err().name(), "FA_ERROR_INVALID_ARGUMENT");
    }
    assert!(!Context::new().unwrap().device().unwrap().cuda);
}

#[test]
fn addresses_stream_and_workspace() {
    let numbers = |step: usize| -> Vec<f32> { (0..COUNT).map(|i| (i * step % 101) as f32 / 50.0 - 1.0).collect() };
    let (q, k, v, dout) = (numbers(7), numbers(11), numbers(13), numbers(17));
    let view = |x| TensorView::new(x, &SHAPE).unwrap();
    let attention = Attention::new(view(&q), view(&k), view(&v)).deterministic().batch_invariant().num_splits(2);
    let mut context = Context::new().unwrap();
    let run = |context: &Context, attention: &Attention<'_>| {
        let (mut out, mut lse) = (vec![0f32; COUNT], vec![0f32; 2 * 3 * 8]);
        let (mut dq, mut dk, mut dv) = (out.clone(), out.clone(), out.clone());
        let mut out_view = TensorViewMut::new(&mut out, &SHAPE).unwrap();
        let mut lse_view = TensorViewMut::new(&mut lse, &[2, 3, 8]).unwrap();
        let mut gradients = Gradients::new(TensorView::new(&dout, &SHAPE).unwrap())
            .dq(TensorViewMut::new(&mut dq, &SHAPE).unwrap())
            .dk(TensorViewMut::new(&mut dk, &SHAPE).unwrap())
            .dv(TensorViewMut::new(&mut dv, &SHAPE).unwrap());
        context.prepare_forward(attention, &out_view, Some(&lse_view))?;
        context.prepare_backward(attention, out_view.as_view(), lse_view.as_view(), &gradients)?;
        context.forward(attention, &mut out_view, Some(&mut lse_view))?;
        let plan = context.query_backward(attention, out_view.as_view(), lse_view.as_view(), &gradients)?;
        context.backward(attention, out_view.as_view(), lse_view.as_view(), &mut gradients)?;
        let bytes = plan.workspace_bytes.max(context.query_forward(attention, &out_view, Some(&lse_view))?.workspace_bytes);
        Ok::<_, flashattn::Error>(((out, lse, dq, dk, dv), bytes as usize))
    };
    let (expected, bytes) = run(&context, &attention).unwrap();
    assert!(bytes > 0);

    // The same from addresses; q by its last row, backwards.
    // SAFETY: they are of slices that stay.
    let by_address = unsafe {
        context.set_stream(0x1234 as *mut c_void); // which the CPU ignores
        let k = TensorView::from_ptr(k.as_ptr(), &SHAPE).unwrap();
        let v = TensorView::from_ptr_strided(v.as_ptr(), &SHAPE, &[8 * 48, 48, 16, 1]).unwrap();
        Attention::new(TensorView::from_ptr(q.as_ptr(), &SHAPE).unwrap(), k, v)
    };
    assert_eq!(run(&context, &by_address).unwrap().0, expected);
    let mut out = vec![0f32; COUNT];
    // SAFETY: as above; out is ours alone.
    unsafe {
        let last = |x: *const f32| x.add(7 * 48);
        let strides = [8 * 48, -48, 16, 1];
        let q = TensorView::from_ptr_strided(last(q.as_ptr()), &SHAPE, &strides).unwrap();
        let attention = Attention::new(q, view(&k), view(&v));
        let mut out = TensorViewMut::from_ptr_strided(out.as_mut_ptr().add(7 * 48), &SHAPE, &strides).unwrap();
        context.forward(&attention, &mut out, None).unwrap();
    }
    assert_eq!(out, expected.0);

    // A workspace of the caller's: too small, and large enough.
    let mut scratch = vec![0u8; bytes + 256];
    let align = scratch.as_ptr().align_offset(256);
    for given in [bytes - 1, bytes] {
        // SAFETY: the memory is ours alone, and outlives its use.
        unsafe { context.set_workspace(scratch.as_mut_ptr().add(align).cast(), given) };
        match run(&context, &attention) {
            Ok((results, _)) => assert!(given == bytes && results == expected),
            Err(error) => assert!(given < bytes && error.name() == "FA_ERROR_WORKSPACE", "{}", error),
        }
    }
    assert!(scratch.iter().any(|&x| x != 0), "the workspace was not used");
    // SAFETY: none is given.
    unsafe { context.set_workspace(null_mut(), 0) };
    assert_eq!(run(&context, &attention).unwrap().0, expected);

    // Preparing does not compute.
    let mut out = vec![7f32; COUNT];
    context.prepare_forward(&attention, &TensorViewMut::new(&mut out, &SHAPE).unwrap(), None).unwrap();
    assert_eq!(out, vec![7f32; COUNT]);
    let mut out = TensorViewMut::new(&mut out, &SHAPE).unwrap();
    assert!(context.prepare_forward(&attention.clone().softcap(-1.0), &out, None).is_err());

    // Seeds that are read when the call runs.
    let seeds = [42u64, 16];
    // SAFETY: they are on the CPU, as the context is.
    let by_address = unsafe { attention.clone().dropout_at(0.5, &seeds[0], &seeds[1]) };
    let (dropped, _) = run(&context, &attention.clone().dropout(0.5, 42, 16)).unwrap();
    assert!(dropped.0 != expected.0);
    assert_eq!(run(&context, &by_address).unwrap().0, dropped);
    assert_eq!(run(&context, &by_address.dropout(0.5, 42, 16)).unwrap().0, dropped); // not by address any more

    // What an address cannot make good.
    // SAFETY: neither is used.
    unsafe {
        assert!(TensorView::from_ptr(q.as_ptr(), &[1, 1, 1, 1, 1]).is_err());
        assert!(TensorViewMut::from_ptr_strided(null_mut::<f32>(), &[2, 24], &[0, 1]).is_err());
        let nowhere = TensorView::from_ptr(null_mut::<f32>(), &SHAPE).unwrap();
        let error = context.forward(&Attention::new(nowhere, view(&k), view(&v)), &mut out, None).unwrap_err();
        assert!(error.text().contains("NULL"), "{}", error);
    }
}
