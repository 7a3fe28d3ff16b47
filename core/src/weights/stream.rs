//! Full tensors to a sink: each in the dtype that was announced, none infinite by rounding, bucket by bucket.

use std::borrow::Cow;

use super::{TensorSlice, WeightManifest, WeightSink};
use crate::{
    DType, Error, ErrorKind, Result, View,
    model::ParameterSpec,
    tensor_file::{f32_to_bf16, f32_to_f16},
};

/// A tensor's values as an engine holds them.
#[derive(Debug, Clone)]
pub enum Masters<'a> {
    /// f32: sent as f64, f32, bf16 or f16.
    F32(Cow<'a, [f32]>),
    /// f64: sent as f64.
    F64(Cow<'a, [f64]>),
}

macro_rules! masters {
    ($($variant:ident: $type:ty),*) => {$(
        impl<'a> From<&'a [$type]> for Masters<'a> {
            fn from(values: &'a [$type]) -> Self { Self::$variant(Cow::Borrowed(values)) }
        }
        impl From<Vec<$type>> for Masters<'_> {
            fn from(values: Vec<$type>) -> Self { Self::$variant(Cow::Owned(values)) }
        }
    )*};
}

masters!(F32: f32, F64: f64);

/// What an engine exports through. It holds one bucket, and of that only what had to be converted or gathered.
///
/// A fault is kept, and what comes after it is dropped: a rank whose sink fails goes on taking part in the
/// gathering, and learns of it from [`Self::flush`]. Where the sink receives nothing, nothing is done.
#[derive(Debug)]
pub struct Streamer<'a> {
    sink: &'a mut dyn WeightSink,
    receives: bool,
    bucket_bytes: usize,
    manifest: WeightManifest,
    /// Tensors that are sent; those in the bucket follow.
    sent: usize,
    bucket: Vec<Encoded<'a>>,
    bytes: usize,
    outcome: Result<()>,
}

impl<'a> Streamer<'a> {
    /// Announces tensors, each in its spec's dtype.
    pub fn begin(sink: &'a mut dyn WeightSink, tensors: Vec<ParameterSpec>, version: u64) -> Self {
        let layout = sink.layout();
        let manifest = WeightManifest { tensors, version };
        let outcome = match layout.receives {
            true => sink.begin(&manifest),
            false => Ok(()),
        };
        Self {
            sink,
            receives: layout.receives,
            bucket_bytes: layout.bucket_bytes,
            manifest,
            sent: 0,
            bucket: Vec::new(),
            bytes: 0,
            outcome,
        }
    }

    /// Whether this rank's sink takes anything.
    pub fn receives(&self) -> bool {
        self.receives
    }

    /// The next tensor, in the order announced; sent when the bucket is full.
    pub fn push(&mut self, values: impl Into<Masters<'a>>) {
        if self.receives && self.outcome.is_ok() {
            self.outcome = self.take(values.into());
        }
    }

    /// Sends what is left and says how all of it went.
    ///
    /// # Errors
    /// The sink's; `NonFinite` naming a tensor with a finite value that its dtype cannot hold.
    pub fn flush(&mut self) -> Result<()> {
        std::mem::replace(&mut self.outcome, Ok(()))?;
        self.send()
    }

    /// Commits if all went well, on every rank if there are several; else aborts the sink.
    ///
    /// # Errors
    /// `outcome`'s, or that of the commit; `Defect` if a tensor did not come.
    pub fn finish(self, outcome: Result<()>) -> Result<()> {
        if !self.receives {
            return outcome;
        }
        let complete =
            || match self.manifest.tensors.get(self.sent) {
                None => Ok(()),
                Some(missing) => Err(defect("a tensor that was announced did not come")
                    .with("tensor", &missing.name)),
            };
        let committed = outcome.and_then(|()| complete());
        let committed = committed.and_then(|()| self.sink.commit());
        if committed.is_err() {
            self.sink.abort();
        }
        committed
    }

    fn take(&mut self, values: Masters<'a>) -> Result<()> {
        let Some(spec) = self.manifest.tensors.get(self.sent + self.bucket.len()) else {
            return Err(defect("a tensor came that was not announced"));
        };
        let bytes = spec.num_elements() * spec.dtype.size();
        if self.bytes + bytes > self.bucket_bytes {
            self.send()?;
        }
        let spec = &self.manifest.tensors[self.sent + self.bucket.len()];
        self.bucket.push(Encoded::new(spec, values)?);
        self.bytes += bytes;
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        let bucket = std::mem::take(&mut self.bucket);
        if bucket.is_empty() {
            return Ok(());
        }
        let slices: Vec<_> = self.manifest.tensors[self.sent..]
            .iter()
            .zip(&bucket)
            .map(|(spec, values)| TensorSlice {
                name: &spec.name,
                shape: &spec.shape,
                slice: spec.shape.iter().map(|&n| 0..n).collect(),
                data: values.view(),
                scale: None,
            })
            .collect();
        self.sink.bucket(&slices)?;
        self.sent += bucket.len();
        self.bytes = 0;
        Ok(())
    }
}

/// Values in the dtype they are sent in.
#[derive(Debug)]
enum Encoded<'a> {
    F64(Cow<'a, [f64]>),
    F32(Cow<'a, [f32]>),
    Bf16(Halves),
    F16(Halves),
}

impl<'a> Encoded<'a> {
    fn new(spec: &ParameterSpec, values: Masters<'a>) -> Result<Self> {
        let len = match &values {
            Masters::F32(v) => v.len(),
            Masters::F64(v) => v.len(),
        };
        if len != spec.num_elements() {
            return Err(defect("a tensor's values do not fill its shape")
                .with("tensor", &spec.name)
                .with("expected", spec.num_elements())
                .with("found", len));
        }
        let mut fits = true;
        let mut kept = |wide: f32, infinite: bool| fits &= !infinite || !wide.is_finite();
        let encoded = match (values, spec.dtype) {
            (Masters::F64(v), DType::F64) => Self::F64(v),
            (Masters::F32(v), DType::F64) => {
                Self::F64(v.iter().map(|&x| f64::from(x)).collect::<Vec<_>>().into())
            }
            (Masters::F32(v), DType::F32) => Self::F32(v),
            (Masters::F32(v), DType::Bf16) => Self::Bf16(Halves::new(v, |wide| {
                let half = f32_to_bf16(wide);
                kept(wide, half.is_infinite());
                half.to_bits()
            })),
            (Masters::F32(v), DType::F16) => Self::F16(Halves::new(v, |wide| {
                let half = f32_to_f16(wide);
                kept(wide, half.is_infinite());
                half.to_bits()
            })),
            (Masters::F32(_), dtype) => {
                return Err(unsupported(&spec.name, dtype, "f64, f32, bf16 or f16"));
            }
            (Masters::F64(_), dtype) => return Err(unsupported(&spec.name, dtype, "f64")),
        };
        match fits {
            true => Ok(encoded),
            false => Err(overflow(&spec.name, spec.dtype)),
        }
    }

    fn view(&self) -> View<'_> {
        match self {
            Self::F64(v) => View::F64(v),
            Self::F32(v) => View::F32(v),
            Self::Bf16(v) => View::Bf16(bytemuck::cast_slice(v.bits())),
            Self::F16(v) => View::F16(bytemuck::cast_slice(v.bits())),
        }
    }
}

/// Elements of 16 bits.
#[derive(Debug)]
enum Halves {
    New(Vec<u16>),
    /// So many, in the memory of the values they were made of: a large tensor that was gathered needs no second.
    InPlace(Vec<f32>, usize),
}

impl Halves {
    fn new(values: Cow<'_, [f32]>, mut narrow: impl FnMut(f32) -> u16) -> Self {
        match values {
            Cow::Borrowed(values) => Self::New(values.iter().map(|&x| narrow(x)).collect()),
            Cow::Owned(mut values) => {
                let len = values.len();
                for i in 0..len {
                    let half = narrow(values[i]);
                    // Half i lies in value i / 2, which has been read.
                    bytemuck::cast_slice_mut::<f32, u16>(&mut values)[i] = half;
                }
                values.truncate(len.div_ceil(2));
                values.shrink_to_fit();
                Self::InPlace(values, len)
            }
        }
    }

    fn bits(&self) -> &[u16] {
        match self {
            Self::New(bits) => bits,
            Self::InPlace(memory, len) => &bytemuck::cast_slice(memory)[..*len],
        }
    }
}

/// A weight that is infinite or a NaN where none may be.
pub(crate) fn not_finite(operation: &'static str, tensor: &str) -> Error {
    Error::new(ErrorKind::NonFinite, operation, "a weight is not finite")
        .with("tensor", tensor)
        .help("lower the learning rate, and go on from an earlier checkpoint")
}

/// A finite weight that the dtype cannot hold.
pub(crate) fn overflow(tensor: &str, dtype: DType) -> Error {
    let message = "a finite weight would become infinite";
    Error::new(ErrorKind::NonFinite, "export_weights", message)
        .with("tensor", tensor)
        .with("dtype", dtype)
        .help("export in bf16 or f32")
}

fn unsupported(tensor: &str, dtype: DType, expected: &str) -> Error {
    let message = "weights are not exported in this dtype";
    Error::new(ErrorKind::Unsupported, "export_weights", message)
        .with("tensor", tensor)
        .with("found", dtype)
        .with("expected", expected)
}

fn defect(message: &str) -> Error {
    Error::new(ErrorKind::Defect, "export_weights", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::ParameterKind,
        weights::{MemoryWeights, SinkLayout},
    };

    /// Keeps what came, bucket by bucket.
    #[derive(Debug, Default)]
    struct Buckets {
        bytes: Vec<Vec<usize>>,
        weights: MemoryWeights,
        aborted: bool,
    }

    impl WeightSink for Buckets {
        fn layout(&self) -> SinkLayout {
            SinkLayout {
                bucket_bytes: 32,
                ..SinkLayout::default()
            }
        }
        fn begin(&mut self, manifest: &WeightManifest) -> Result<()> {
            self.weights.begin(manifest)
        }
        fn bucket(&mut self, tensors: &[TensorSlice<'_>]) -> Result<()> {
            let sizes = tensors.iter().map(|t| t.data.num_bytes());
            self.bytes.push(sizes.collect());
            self.weights.bucket(tensors)
        }
        fn commit(&mut self) -> Result<()> {
            self.weights.commit()
        }
        fn abort(&mut self) {
            self.aborted = true;
        }
    }

    fn spec(name: &str, len: usize, dtype: DType) -> ParameterSpec {
        ParameterSpec {
            name: name.to_owned(),
            shape: vec![len],
            kind: ParameterKind::Head,
            layer: None,
            expert: None,
            dtype,
        }
    }

    fn stream(sink: &mut Buckets, tensors: &[(DType, &[f32])]) -> Result<()> {
        let name = |i: usize| format!("w{i}");
        let specs = tensors.iter().enumerate();
        let specs = specs.map(|(i, (dtype, v))| spec(&name(i), v.len(), *dtype));
        let mut streamer = Streamer::begin(sink, specs.collect(), 3);
        for (i, (_, values)) in tensors.iter().enumerate() {
            match i % 2 {
                0 => streamer.push(values.to_vec()),
                _ => streamer.push(*values),
            }
        }
        let sent = streamer.flush();
        streamer.finish(sent)
    }

    #[test]
    fn buckets_fill_up_and_a_larger_tensor_is_one_of_its_own() {
        let (small, large) = ([1.5f32; 3], [2.0f32; 9]);
        let mut sink = Buckets::default();
        let small = (DType::F32, &small[..]);
        stream(
            &mut sink,
            &[small, small, small, (DType::F32, &large), small],
        )
        .unwrap();
        assert_eq!(sink.bytes, [vec![12, 12], vec![12], vec![36], vec![12]]);
        assert!(sink.weights.is_committed() && !sink.aborted);
        assert_eq!(sink.weights.values("w3").unwrap(), [2.0; 9]);
        assert_eq!(sink.weights.len(), 5);
    }

    #[test]
    fn each_dtype_holds_the_nearest_value() {
        let values: &[f32] = &[1.0 + 2.0_f32.powi(-9), f32::NAN, f32::INFINITY, -65504.0];
        let expected = [
            (DType::F64, 1.0 + 2.0_f64.powi(-9), -65504.0),
            (DType::F32, 1.0 + 2.0_f64.powi(-9), -65504.0),
            (DType::Bf16, 1.0, -65536.0),
            (DType::F16, 1.0 + 2.0_f64.powi(-9), -65504.0),
        ];
        for (dtype, first, last) in expected {
            let mut sink = Buckets::default();
            let (owned, borrowed) = ((dtype, values), (dtype, values));
            stream(&mut sink, &[owned, borrowed]).unwrap();
            for name in ["w0", "w1"] {
                let found = sink.weights.values(name).unwrap();
                assert_eq!((found[0], found[3]), (first, last), "{dtype}");
                assert!(found[1].is_nan() && found[2] == f64::INFINITY, "{dtype}");
            }
        }
    }

    #[test]
    fn a_finite_value_that_does_not_fit_names_its_tensor_and_aborts() {
        let too_large = [(DType::F16, 7e4f32), (DType::Bf16, f32::MAX)];
        for (dtype, value) in too_large {
            let mut sink = Buckets::default();
            let error = stream(&mut sink, &[(dtype, &[0.5]), (dtype, &[value])]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NonFinite);
            assert_eq!(error.context("tensor"), Some("w1"));
            assert!(sink.aborted && !sink.weights.is_committed());
        }
    }

    #[test]
    fn what_was_not_announced_or_did_not_come_is_a_defect() {
        let mut sink = Buckets::default();
        let specs = vec![spec("a", 2, DType::F32), spec("b", 1, DType::F32)];
        let cases: [&[&[f32]]; 3] = [&[&[1.0, 2.0]], &[&[1.0]], &[&[1.0, 2.0], &[3.0], &[4.0]]];
        for tensors in cases {
            let mut streamer = Streamer::begin(&mut sink, specs.clone(), 0);
            tensors.iter().for_each(|values| streamer.push(*values));
            let sent = streamer.flush();
            let error = streamer.finish(sent).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Defect, "{tensors:?}");
            assert!(std::mem::take(&mut sink.aborted));
        }
    }
}
