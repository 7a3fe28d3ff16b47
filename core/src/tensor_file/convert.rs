//! Elements to and from bytes. A NaN keeps its payload as far as the target holds it, so that a file read and
//! written unchanged is the same file.

use half::{bf16, f16};

use crate::DType;

/// Appends the elements in `bytes` as f32: exact but from f64 and large integers, which are rounded.
pub(crate) fn to_f32(dtype: DType, bytes: &[u8], out: &mut Vec<f32>) {
    match dtype {
        DType::F64 => out.extend(chunks(bytes).map(|b| f64::from_le_bytes(b) as f32)),
        DType::F32 => out.extend(chunks(bytes).map(f32::from_le_bytes)),
        DType::Bf16 => out.extend(chunks(bytes).map(|b| bf16_to_f32(u16::from_le_bytes(b)))),
        DType::F16 => out.extend(chunks(bytes).map(|b| f16_to_f32(u16::from_le_bytes(b)))),
        DType::I64 => out.extend(chunks(bytes).map(|b| i64::from_le_bytes(b) as f32)),
        DType::I32 => out.extend(chunks(bytes).map(|b| i32::from_le_bytes(b) as f32)),
        DType::U8 => out.extend(bytes.iter().map(|&b| f32::from(b))),
    }
}

/// Appends the elements in `bytes` as f64: exact but from large `i64`.
pub(crate) fn to_f64(dtype: DType, bytes: &[u8], out: &mut Vec<f64>) {
    match dtype {
        DType::F64 => out.extend(chunks(bytes).map(f64::from_le_bytes)),
        DType::I64 => out.extend(chunks(bytes).map(|b| i64::from_le_bytes(b) as f64)),
        DType::I32 => out.extend(chunks(bytes).map(|b| f64::from(i32::from_le_bytes(b)))),
        DType::F32 | DType::Bf16 | DType::F16 | DType::U8 => {
            let mut values = Vec::new();
            to_f32(dtype, bytes, &mut values);
            out.extend(values.into_iter().map(f64::from));
        }
    }
}

fn chunks<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}

fn bf16_to_f32(bits: u16) -> f32 {
    // Not half's conversion, which quiets a signalling NaN.
    f32::from_bits(u32::from(bits) << 16)
}

fn f16_to_f32(bits: u16) -> f32 {
    match bits & 0x7c00 == 0x7c00 && bits & 0x03ff != 0 {
        true => {
            let sign = u32::from(bits & 0x8000) << 16;
            f32::from_bits(sign | 0x7f80_0000 | u32::from(bits & 0x03ff) << 13)
        }
        false => f16::from_bits(bits).to_f32(),
    }
}

/// The nearest bf16.
#[cfg_attr(not(test), expect(dead_code, reason = "for the writer"))]
pub(crate) fn f32_to_bf16(value: f32) -> bf16 {
    match value.is_nan() {
        true => bf16::from_bits(nan_bits(value, 16, 0x0040)),
        false => bf16::from_f32(value),
    }
}

/// The nearest f16; infinite above 65504.
#[cfg_attr(not(test), expect(dead_code, reason = "for the writer"))]
pub(crate) fn f32_to_f16(value: f32) -> f16 {
    match value.is_nan() {
        true => {
            let bits = value.to_bits();
            let (sign, payload) = ((bits >> 16) as u16 & 0x8000, (bits >> 13) as u16 & 0x03ff);
            f16::from_bits(sign | 0x7c00 | if payload == 0 { 0x0200 } else { payload })
        }
        false => f16::from_f32(value),
    }
}

/// The upper bits of a NaN; `quiet` keeps it a NaN where the payload was all below.
fn nan_bits(value: f32, shift: u32, quiet: u16) -> u16 {
    let bits = (value.to_bits() >> shift) as u16;
    if bits & 0x007f == 0 {
        bits | quiet
    } else {
        bits
    }
}
