//! What tch lacks, in C++: one file a concern.
//!
//! `at::Tensor` crosses the border as an opaque C++ type. tch's `C_tensor` is the same class, so a pointer to
//! one is a pointer to the other; the functions here are the only place that relies on it.

use tch::{TchError, Tensor};

use crate::error::Torch;

#[cxx::bridge]
#[allow(unreachable_pub, clippy::missing_safety_doc)]
mod ffi {
    #[namespace = "at"]
    unsafe extern "C++" {
        include!("ATen/core/Tensor.h");
        type Tensor;
    }

    #[namespace = "drivetrain"]
    unsafe extern "C++" {
        include!("autograd.h");
        type TensorList;
        fn tensor_list() -> UniquePtr<TensorList>;
        fn push(self: Pin<&mut TensorList>, tensor: &Tensor);
        fn size(self: &TensorList) -> usize;
        fn get(self: &TensorList, index: usize) -> Result<UniquePtr<Tensor>>;
        fn take(self: Pin<&mut TensorList>, index: usize) -> Result<UniquePtr<Tensor>>;
        fn gradients(
            outputs: &TensorList,
            inputs: &TensorList,
            output_gradients: &TensorList,
        ) -> Result<UniquePtr<TensorList>>;

        include!("adamw.h");
        #[allow(clippy::too_many_arguments)]
        fn fused_adamw(
            weights: &TensorList,
            gradients: &TensorList,
            exp_avgs: &TensorList,
            exp_avg_sqs: &TensorList,
            learning_rate: f64,
            beta1: f64,
            beta2: f64,
            weight_decay: f64,
            epsilon: f64,
            count: f64,
        ) -> Result<()>;

        include!("linear.h");
        fn exact_linear(x: &Tensor, weight: &Tensor) -> Result<UniquePtr<Tensor>>;

        include!("recompute.h");
        type Recomputed;
        fn recomputed(inputs: &TensorList, segment: Box<Segment>) -> Result<UniquePtr<Recomputed>>;
        fn output(self: &Recomputed) -> UniquePtr<Tensor>;
        fn discard(self: Pin<&mut Recomputed>, consumers: &TensorList) -> Result<()>;

        include!("rms_norm.h");
        fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<UniquePtr<Tensor>>;

        include!("storage.h");
        fn resize_storage(tensor: &Tensor, bytes: usize) -> Result<()>;
        fn release_memory();
    }

    #[namespace = "drivetrain"]
    extern "Rust" {
        type Segment;
        fn run(self: &Segment, inputs: &TensorList) -> Result<UniquePtr<Tensor>>;
    }
}

/// A part of a block, as a function of tensors.
struct Segment(Box<Part>);

type Part = dyn Fn(&[Tensor]) -> Torch<Tensor>;

impl Segment {
    fn run(&self, inputs: &ffi::TensorList) -> Torch<cxx::UniquePtr<ffi::Tensor>> {
        let inputs = (0..inputs.size()).map(|i| inputs.get(i).map(own).map_err(thrown));
        (self.0)(&inputs.collect::<Torch<Vec<_>>>()?).map(give)
    }
}

/// What came of a part whose inside is computed again in backward.
#[must_use = "its memory is kept until it is discarded"]
pub(crate) struct Recomputed(cxx::UniquePtr<ffi::Recomputed>);

/// Runs a part of a block that keeps nothing for backward but its inputs; its inside is computed again there. With its
/// output, which may be discarded too.
pub(crate) fn recomputed(
    inputs: &[&Tensor],
    part: impl Fn(&[Tensor]) -> Torch<Tensor> + 'static,
) -> Torch<(Tensor, Recomputed)> {
    let inputs = list(inputs.iter().copied());
    let part = Box::new(Segment(Box::new(part)));
    let recomputed = ffi::recomputed(&inputs, part).map_err(thrown)?;
    Ok((own(recomputed.output()), Recomputed(recomputed)))
}

impl Recomputed {
    /// Frees the output's memory, which is filled again when the gradient of any of these is known: whatever was computed
    /// from it and reads it in its own backward. Where no graph is kept, nothing happens.
    pub(crate) fn discard(mut self, consumers: &[&Tensor]) -> Torch<()> {
        let consumers = list(consumers.iter().copied());
        self.0.pin_mut().discard(&consumers).map_err(thrown)
    }
}

/// Gradients with respect to `inputs`, given those with respect to some outputs: pairs of an output and its gradient.
/// Frees the graph.
pub(crate) fn gradients(outputs: &[(&Tensor, &Tensor)], inputs: &[&Tensor]) -> Torch<Vec<Tensor>> {
    let given = list(outputs.iter().map(|(_, gradient)| *gradient));
    let outputs = list(outputs.iter().map(|(output, _)| *output));
    let inputs = list(inputs.iter().copied());
    let mut gradients = ffi::gradients(&outputs, &inputs, &given).map_err(thrown)?;
    (0..gradients.size())
        .map(|i| gradients.pin_mut().take(i).map(own).map_err(thrown))
        .collect()
}

/// `x weight^T`, each dot product summed in f64 and rounded once. The graph holds what that of `f_linear` holds, and its
/// backward is the same, in f32; of the weight a piece of fixed size is in f64 at a time. x `[n, in]`, weight
/// `[out, in]`, both f32 in host memory.
pub(crate) fn exact_linear(x: &Tensor, weight: &Tensor) -> Torch<Tensor> {
    ffi::exact_linear(borrow(x), borrow(weight))
        .map(own)
        .map_err(thrown)
}

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dim (Zhang and Sennrich 2019), with its own backward: one pass a
/// direction, sums in f64, in host memory; elsewhere libtorch's own. x `[.., D]`, weight `[D]`, both f32 or both bf16.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Torch<Tensor> {
    ffi::rms_norm(borrow(x), borrow(weight), eps)
        .map(own)
        .map_err(thrown)
}

/// The numbers of one AdamW update.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdamwScalars {
    pub(crate) learning_rate: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) weight_decay: f64,
    pub(crate) epsilon: f64,
    /// Updates, this one included.
    pub(crate) count: u64,
}

/// `torch.optim.AdamW`'s fused update of tensors of one decay, in place.
pub(crate) fn fused_adamw(
    weights: &[Tensor],
    gradients: &[Tensor],
    exp_avgs: &[Tensor],
    exp_avg_sqs: &[Tensor],
    scalars: AdamwScalars,
) -> Torch<()> {
    ffi::fused_adamw(
        &list(weights),
        &list(gradients),
        &list(exp_avgs),
        &list(exp_avg_sqs),
        scalars.learning_rate,
        scalars.beta1,
        scalars.beta2,
        scalars.weight_decay,
        scalars.epsilon,
        scalars.count as f64,
    )
    .map_err(thrown)
}

/// Sets the size of the memory behind a tensor and all its views; 0 frees it. The contents are not kept.
pub(crate) fn resize_storage(tensor: &Tensor, bytes: usize) -> Torch<()> {
    ffi::resize_storage(borrow(tensor), bytes).map_err(thrown)
}

/// Gives memory that the heap holds and nobody uses back to the system.
pub(crate) fn release_memory() {
    ffi::release_memory();
}

fn list<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> cxx::UniquePtr<ffi::TensorList> {
    let mut list = ffi::tensor_list();
    for tensor in tensors {
        list.pin_mut().push(borrow(tensor));
    }
    list
}

fn thrown(exception: cxx::Exception) -> TchError {
    TchError::Torch(exception.what().to_owned())
}

fn borrow(tensor: &Tensor) -> &ffi::Tensor {
    // SAFETY: tch holds a live `at::Tensor` behind this pointer for as long as `tensor` lives, and
    // `ffi::Tensor` is opaque: it is only handed back to C++, by reference to const.
    unsafe { &*tensor.as_ptr().cast::<ffi::Tensor>() }
}

fn own(tensor: cxx::UniquePtr<ffi::Tensor>) -> Tensor {
    // SAFETY: the pointer is to an `at::Tensor` made by `new`; tch deletes it as such, once.
    unsafe { Tensor::from_ptr(tensor.into_raw().cast()) }
}

/// The reverse of [`own`].
fn give(tensor: Tensor) -> cxx::UniquePtr<ffi::Tensor> {
    let pointer = tensor.as_ptr().cast::<ffi::Tensor>().cast_mut();
    std::mem::forget(tensor);
    // SAFETY: tch made the `at::Tensor` behind the pointer with `new` and forgot it; C++ deletes it, once.
    unsafe { cxx::UniquePtr::from_raw(pointer) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `(silu(x) x) w^T`, with what is in brackets kept, computed again, and discarded.
    #[test]
    fn what_is_computed_again_gives_the_same_gradients() {
        let options = (tch::Kind::Float, tch::Device::Cpu);
        let wave = |shape: [i64; 2]| (Tensor::arange(shape[0] * shape[1], options) * 0.3).sin();
        let x = wave([5, 4]).view([5, 4]).set_requires_grad(true);
        let w = wave([3, 4]).view([3, 4]).set_requires_grad(true);
        let dy = wave([5, 3]).view([5, 3]);
        let inner = |x: &Tensor| x.f_silu()?.f_mul(x);
        let kept = inner(&x).unwrap().matmul(&w.tr());
        let expected = gradients(&[(&kept, &dy)], &[&x, &w]).unwrap();
        for discarded in [false, true] {
            let (h, again) = recomputed(&[&x], move |t| inner(&t[0])).unwrap();
            let y = h.matmul(&w.tr());
            assert!(y.equal(&kept));
            if discarded {
                again.discard(&[&y]).unwrap();
                assert!(h.data_ptr().is_null());
            }
            let found = gradients(&[(&y, &dy)], &[&x, &w]).unwrap();
            assert!(found[0].equal(&expected[0]) && found[1].equal(&expected[1]));
            assert!(!h.data_ptr().is_null());
        }
        tch::no_grad(|| {
            let (h, again) = recomputed(&[&x], move |t| inner(&t[0])).unwrap();
            let y = h.matmul(&w.tr());
            again.discard(&[&y]).unwrap();
            assert!(!h.data_ptr().is_null() && y.equal(&kept));
        });
    }

    #[test]
    fn a_part_that_fails_forward_or_backward_is_an_error() {
        let x = Tensor::from_slice(&[1.0f32]).set_requires_grad(true);
        let fails = || Err(TchError::Torch("told so".to_owned()));
        assert!(recomputed(&[&x], move |_| fails()).is_err());
        let calls = std::cell::Cell::new(0);
        let (y, _) = recomputed(&[&x], move |t| {
            calls.set(calls.get() + 1);
            if calls.get() == 1 {
                t[0].f_silu()
            } else {
                fails()
            }
        })
        .unwrap();
        let dy = Tensor::from_slice(&[1.0f32]);
        let error = gradients(&[(&y, &dy)], &[&x]).unwrap_err();
        assert!(error.to_string().contains("told so"), "{error}");
    }

    #[test]
    fn a_freed_weight_is_put_back_before_backward() {
        let x = Tensor::from_slice(&[1.0f32, 2.0])
            .reshape([1, 2])
            .set_requires_grad(true);
        let flat = Tensor::from_slice(&[3.0f32, 4.0, 5.0, 6.0]);
        let w = flat.view([2, 2]).detach().set_requires_grad(true);
        let y = x.matmul(&w.tr());
        resize_storage(&flat, 0).unwrap();
        assert!(flat.data_ptr().is_null());
        resize_storage(&flat, 16).unwrap();
        let mut back = flat.shallow_clone();
        let back = crate::host::floats_mut(&mut back).unwrap();
        back.copy_from_slice(&[3.0, 4.0, 5.0, 6.0]);
        let dy = Tensor::from_slice(&[1.0f32, 10.0]).reshape([1, 2]);
        let g = gradients(&[(&y, &dy)], &[&x, &w]).unwrap();
        assert_eq!(
            Vec::<f32>::try_from(g[0].flatten(0, -1)).unwrap(),
            [53.0, 64.0]
        );
        assert_eq!(
            Vec::<f32>::try_from(g[1].flatten(0, -1)).unwrap(),
            [1.0, 2.0, 10.0, 20.0]
        );
    }

    #[test]
    fn rms_norm_of_bf16_is_that_of_its_values_rounded_once() {
        let wave = |shape: &[i64]| {
            let options = (tch::Kind::Float, tch::Device::Cpu);
            let angles = Tensor::arange(shape.iter().product::<i64>(), options) * 0.7;
            angles.sin().view(shape).to_kind(tch::Kind::BFloat16)
        };
        let [x, weight, dy] = [wave(&[140, 13]), wave(&[13]), wave(&[140, 13])];
        let run = |kind| {
            let leaf = |t: &Tensor| t.to_kind(kind).detach().set_requires_grad(true);
            let (x, weight) = (leaf(&x), leaf(&weight));
            let y = rms_norm(&x, &weight, 1e-5).unwrap();
            let mut all = gradients(&[(&y, &dy.to_kind(kind))], &[&x, &weight]).unwrap();
            all.push(y.detach());
            all
        };
        let (found, wide) = (run(tch::Kind::BFloat16), run(tch::Kind::Float));
        for (found, wide) in found.iter().zip(&wide) {
            assert_eq!(found.kind(), tch::Kind::BFloat16);
            let rounded = wide.to_kind(tch::Kind::BFloat16);
            assert!(found.equal(&rounded), "{found} {rounded}");
        }
        assert!(rms_norm(&x, &weight.to_kind(tch::Kind::Float), 1e-5).is_err());
    }

    #[test]
    fn rms_norm_is_libtorch_s_own_in_f64() {
        let options = (tch::Kind::Float, tch::Device::Cpu);
        let [x, weight, dy] = [vec![300, 13], vec![13], vec![300, 13]].map(|shape| {
            let len = shape.iter().product::<i64>();
            let angles = tch::Tensor::arange(len, options) * (0.7 + len as f64 * 1e-3);
            angles.sin().view(shape.as_slice())
        });
        let (x, weight) = (x.set_requires_grad(true), weight.set_requires_grad(true));
        let y = rms_norm(&x, &weight, 1e-5).unwrap();
        let found = gradients(&[(&y, &dy)], &[&x, &weight]).unwrap();
        let double = |t: &Tensor| {
            t.detach()
                .to_kind(tch::Kind::Double)
                .set_requires_grad(true)
        };
        let (x64, weight64) = (double(&x), double(&weight));
        let y64 = x64.rms_norm(13, Some(&weight64), 1e-5);
        let truth = gradients(
            &[(&y64, &dy.to_kind(tch::Kind::Double))],
            &[&x64, &weight64],
        )
        .unwrap();
        for (found, truth) in [(&y, &y64), (&found[0], &truth[0]), (&found[1], &truth[1])] {
            assert_eq!(found.size(), truth.size());
            let gap = f64::try_from((found - truth).abs().max() / truth.abs().max()).unwrap();
            assert!(gap <= 1e-7, "{gap}");
        }
    }

    /// Of a weight that is one piece, and of one that is many.
    #[test]
    fn exact_linear_rounds_once_and_goes_back_as_linear_does() {
        let options = (tch::Kind::Float, tch::Device::Cpu);
        let wave = |shape: [i64; 2]| {
            let angles = Tensor::arange(shape[0] * shape[1], options) * 0.37;
            angles.sin().view(shape)
        };
        for (rows, inner, outer) in [(3, 40, 7), (5, 1000, 300), (0, 4, 2)] {
            let x = wave([rows, inner]).set_requires_grad(true);
            let weight = wave([outer, inner]).set_requires_grad(true);
            let y = exact_linear(&x, &weight).unwrap();
            let double = |t: &Tensor| t.detach().to_kind(tch::Kind::Double);
            let truth = double(&x).matmul(&double(&weight).tr());
            assert!(double(&y).allclose(&truth, 1e-7, 1e-12, false));
            let plain = x.linear(&weight, None::<Tensor>);
            let dy = wave([rows, outer]);
            let found = gradients(&[(&y, &dy)], &[&x, &weight]).unwrap();
            let expected = gradients(&[(&plain, &dy)], &[&x, &weight]).unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                assert!(found.allclose(expected, 1e-5, 1e-5, false));
            }
        }
        let (x, long) = (wave([2, 3]), wave([2, 4]));
        assert!(exact_linear(&x, &long).is_err());
        assert!(exact_linear(&x.to_kind(tch::Kind::Double), &x).is_err());
    }

    #[test]
    fn an_input_outside_the_graph_is_an_error() {
        let x = Tensor::from_slice(&[1.0f32]).set_requires_grad(true);
        let stray = Tensor::from_slice(&[1.0f32]).set_requires_grad(true);
        assert!(gradients(&[(&(&x * 2.0), &Tensor::from_slice(&[1.0f32]))], &[&stray]).is_err());
    }
}
