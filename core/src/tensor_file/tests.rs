use std::{fs, path::Path};

use super::{TensorFile, TensorFileAppender, convert};
use crate::{DType, Error, ErrorKind, View};

/// A file with this header, then `data` zero bytes.
fn bytes(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn open(bytes: &[u8]) -> Result<TensorFile, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, bytes).unwrap();
    TensorFile::open(&path)
}

const GOOD: &str = concat!(
    r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"#,
    r#""b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}}"#
);

#[test]
fn a_good_file_is_read() {
    let file = open(&bytes(GOOD, 14)).unwrap();
    let names: Vec<_> = file.tensors().map(|(name, _)| name).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(file.entry("b").unwrap().dtype, DType::Bf16);
    assert_eq!(file.read_f32("b", 1..3).unwrap(), [0.0, 0.0]);
    assert_eq!(file.read_f64("a", 0..0).unwrap(), [0.0; 0]);
    assert!(file.read_f32("a", 1..3).is_err());
    // Order in the header is not order in the file.
    let swapped = r#"{"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    assert!(open(&bytes(swapped, 2)).is_ok());
}

#[test]
fn every_malformation_is_an_error_that_names_the_file() {
    // C07
    let good = bytes(GOOD, 14);
    let tensor = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let two = |second: &str| {
        format!(r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}},{second}}}"#)
    };
    let mut trailing = good.clone();
    trailing.push(0);
    let mut huge = good.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut large = good.clone();
    large[..8].copy_from_slice(&(90u64 << 20).to_le_bytes());
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("last byte cut", good[..good.len() - 1].to_vec()),
        ("header cut", good[..40].to_vec()),
        ("4 bytes", good[..4].to_vec()),
        ("empty", Vec::new()),
        ("trailing byte", trailing),
        ("huge header length", huge),
        ("header longer than the file", large),
        (
            "overlap",
            bytes(
                &two(r#""b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}"#),
                6,
            ),
        ),
        (
            "hole",
            bytes(
                &two(r#""b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}"#),
                9,
            ),
        ),
        (
            "first byte unused",
            bytes(&tensor(r#""U8""#, "[4]", "[1,5]"), 5),
        ),
        ("bad shape", bytes(&tensor(r#""F32""#, "[3]", "[0,8]"), 8)),
        (
            "negative shape",
            bytes(&tensor(r#""F32""#, "[-1]", "[0,8]"), 8),
        ),
        (
            "overflowing shape",
            bytes(
                &tensor(r#""F32""#, "[4294967296,4294967296,4294967296]", "[0,8]"),
                8,
            ),
        ),
        (
            "backward offsets",
            bytes(&tensor(r#""U8""#, "[4]", "[4,0]"), 4),
        ),
        ("empty dtype", bytes(&tensor(r#""""#, "[2]", "[0,8]"), 8)),
        (
            "duplicate key",
            bytes(
                &two(r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#),
                4,
            ),
        ),
        (
            "duplicate key, other data",
            bytes(
                &two(r#""a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}"#),
                8,
            ),
        ),
        ("not an object", bytes("[]", 0)),
        ("not JSON", bytes("{\"a\":", 0)),
        (
            "not UTF-8",
            [2u64.to_le_bytes().as_slice(), &[0xff, 0xff]].concat(),
        ),
    ];
    for (case, bytes) in cases {
        let Err(error) = open(&bytes) else {
            panic!("{case} was accepted")
        };
        assert_eq!(error.kind(), ErrorKind::File, "{case}: {error}");
        assert!(
            error
                .context("file")
                .unwrap()
                .ends_with("model.safetensors"),
            "{case}: {error}"
        );
    }
    let error = open(&bytes(&tensor(r#""F8_E4M3""#, "[4]", "[0,4]"), 4)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(TensorFile::open(Path::new("/nonexistent/x.safetensors")).is_err());
    assert!(TensorFile::open(Path::new("/")).is_err());
}

#[test]
fn every_16_bit_pattern_survives_f32() {
    // C08: NaN payloads and signs too.
    let patterns: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let mut values = Vec::new();
    convert::to_f32(DType::Bf16, &patterns, &mut values);
    for (bits, &value) in (0..=u16::MAX).zip(&values) {
        assert_eq!(convert::f32_to_bf16(value).to_bits(), bits);
        assert_eq!(value.is_nan(), half::bf16::from_bits(bits).is_nan());
    }
    values.clear();
    convert::to_f32(DType::F16, &patterns, &mut values);
    assert_eq!(values.len(), 1 << 16);
    for (bits, &value) in (0..=u16::MAX).zip(&values) {
        assert_eq!(convert::f32_to_f16(value).to_bits(), bits);
        assert_eq!(value.is_nan(), half::f16::from_bits(bits).is_nan());
    }
    // A NaN whose payload does not fit stays a NaN.
    let low = f32::from_bits(0xff80_0001);
    assert!(convert::f32_to_bf16(low).is_nan() && convert::f32_to_bf16(low).is_sign_negative());
    assert!(convert::f32_to_f16(low).is_nan() && convert::f32_to_f16(low).is_sign_negative());
    // Rounding is to nearest, ties to even.
    assert_eq!(
        convert::f32_to_bf16(f32::from_bits(0x3f80_8000)).to_bits(),
        0x3f80
    );
    assert_eq!(
        convert::f32_to_bf16(f32::from_bits(0x3f81_8000)).to_bits(),
        0x3f82
    );
}

#[test]
fn a_header_that_outgrows_its_room_moves_the_data() {
    let folder = tempfile::tempdir().unwrap();
    for (case, room) in [("fits", 4096), ("grows", 16)] {
        let path = folder.path().join(case);
        let mut file = TensorFileAppender::with_room(&path, room).unwrap();
        for i in 0..9u8 {
            file.append(format!("t{i}"), DType::U8, &[i; 3]).unwrap();
        }
        let len = file.finish().unwrap();
        assert_eq!(len, fs::metadata(&path).unwrap().len());
        let file = TensorFile::open(&path).unwrap();
        for i in 0..9u8 {
            assert_eq!(
                file.read_f32(&format!("t{i}"), 0..3).unwrap(),
                [f32::from(i); 3]
            );
        }
        assert!(TensorFileAppender::create(&path).is_err());
    }
}

#[test]
fn f64_is_rounded_once() {
    let narrow = |value: f64, dtype| {
        let mut bytes = Vec::new();
        let fits = convert::encode(&View::F64(&[value]), 0..1, dtype, &mut bytes).unwrap();
        (u16::from_le_bytes([bytes[0], bytes[1]]), fits)
    };
    // Beside the middle of two neighbours, but the middle itself in f32.
    for (dtype, middle, below) in [
        (DType::Bf16, 1.003_906_25, 0x3f80),
        (DType::F16, 1.000_488_281_25, 0x3c00),
    ] {
        assert_eq!(narrow(middle + 1e-12, dtype), (below + 1, true));
        assert_eq!(narrow(middle, dtype), (below, true));
        assert_eq!(narrow(middle - 1e-12, dtype), (below, true));
        assert_eq!(narrow(-middle - 1e-12, dtype), (0x8000 | (below + 1), true));
        assert_eq!(narrow(-middle + 1e-12, dtype), (0x8000 | below, true));
        assert_eq!(narrow(1e-300, dtype), (0, true));
        assert!(!narrow(1e300, dtype).1 && narrow(f64::INFINITY, dtype).1);
    }
    assert_eq!(narrow(65519.99, DType::F16), (0x7bff, true));
    assert!(!narrow(65520.0, DType::F16).1);
}
