//! CUDA's libraries, missing, broken or too old: always an error that says which and where, never a panic.

use std::path::{Path, PathBuf};

use drivetrain_kernels::cuda::{CudaError, Gpu, Library};

/// Known failure: a library that is not found panics, with names but no folders.
#[test]
fn an_absent_library_is_an_error_with_every_path_and_what_to_do() {
    for library in [
        Library::Driver,
        Library::Nvrtc,
        Library::CublasLt,
        Library::Nccl,
    ] {
        let all = library.candidates(&[PathBuf::from("/nowhere")]);
        let (named, rest) = all.split_at(library.files().len());
        assert!(named.iter().all(|path| path.starts_with("/nowhere")));
        assert_eq!(
            rest[0],
            Path::new(library.files()[0]),
            "the system's own search comes next"
        );
        assert!(rest.contains(&Path::new("/usr/local/cuda/lib64").join(library.files()[1])));

        let absent: Vec<PathBuf> = all
            .iter()
            .map(|path| Path::new("/nowhere").join(path.file_name().unwrap()))
            .collect();
        let text = library.probe(&absent).unwrap_err().to_string();
        assert!(
            text.starts_with(&format!("{} cannot be loaded", library.name())),
            "{text}"
        );
        for path in &absent {
            assert!(
                text.contains(&format!("\n  {}: no such file", path.display())),
                "{text}"
            );
        }
        assert!(
            text.contains(&format!("help     {}", library.help())),
            "{text}"
        );
    }
}

/// Known failure: only one file name is tried. Here the folder has another, which is no library at all.
#[test]
fn older_file_names_are_tried_and_what_does_not_load_says_why() {
    let folder = std::env::temp_dir().join(format!("drivetrain-libraries-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let old = folder.join("libcublasLt.so.12");
    std::fs::write(
        &old,
        "not a library, though longer than the header of one would have to be",
    )
    .unwrap();
    let files = Library::CublasLt
        .files()
        .iter()
        .map(|file| folder.join(file))
        .collect::<Vec<_>>();
    let error = Library::CublasLt.probe(&files).unwrap_err();
    std::fs::remove_dir_all(&folder).unwrap();
    let CudaError::Library { tried, .. } = error else {
        panic!("{error}");
    };
    let found: Vec<_> = tried.iter().map(|(path, _)| path.clone()).collect();
    assert_eq!(found, files);
    assert_eq!(tried[0].1, "no such file");
    assert!(
        tried[1].0 == old && tried[1].1.contains("invalid ELF header"),
        "{tried:?}"
    );
}

/// Known failure: a library without a function we need panics at the first call of it.
#[test]
fn a_library_without_our_functions_is_an_error_that_names_the_first() {
    // The C library is at hand everywhere and has none of them.
    let error = Library::Driver
        .probe(&[PathBuf::from("libc.so.6")])
        .unwrap_err();
    let text = error.to_string();
    let CudaError::Symbol { library, symbol } = error else {
        panic!("{error}");
    };
    assert_eq!((library, symbol), ("libcuda", "cuInit"));
    assert!(text.starts_with("libcuda has no function cuInit"), "{text}");
}

/// Known failure: choosing CUDA on a machine without a driver ends the process.
#[test]
fn without_a_driver_a_device_is_an_error_that_says_what_to_do() {
    match Gpu::open(0) {
        // A machine with a GPU: what it does is the parity program's concern.
        Ok(gpu) => println!("{gpu:?}"),
        Err(CudaError::Library {
            library,
            tried,
            help,
        }) => {
            assert_eq!(library, "libcuda");
            assert!(
                tried
                    .iter()
                    .any(|(path, _)| path == Path::new("libcuda.so.1")),
                "{tried:?}"
            );
            assert!(help.contains("driver"), "{help}");
        }
        // A driver without a device, or one that NVRTC does not fit: the message is the point.
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let absent = Gpu::open(usize::MAX);
    assert!(absent.is_err(), "{absent:?}");
}
