//! What can go wrong on a device or on the way to one.

use std::fmt;
use std::path::PathBuf;

/// A fault of CUDA: always an `Err`, never a panic.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaError {
    /// Made without the feature `cuda`.
    NotBuilt,
    /// A library could not be found or loaded.
    Library {
        /// As in `libcuda`.
        library: &'static str,
        /// Every file that was tried, with what the loader said.
        tried: Vec<(PathBuf, String)>,
        /// What to do.
        help: &'static str,
    },
    /// A library was loaded but is too old or too new for us.
    Symbol {
        /// As in `libcuda`.
        library: &'static str,
        /// The function it lacks.
        symbol: &'static str,
    },
    /// No such device.
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// Neither machine code nor PTX of ours runs there.
    Target {
        /// Version of CUDA that the driver supports, as 1000 major + 10 minor.
        driver: u32,
        /// Version of NVRTC, likewise.
        toolkit: u32,
        /// The device's compute capability, as 10 major + minor.
        sm: u32,
        /// Which of them does not fit, and what would.
        reason: String,
    },
    /// A kernel's source did not compile.
    Compile {
        /// The source.
        module: &'static str,
        /// What it was compiled for, as in `sm_90`.
        target: String,
        /// What the compiler said.
        log: String,
    },
    /// A call failed.
    Call {
        /// What was being done, with its operands.
        what: String,
        /// What the library said.
        reason: String,
    },
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBuilt => write!(f, "this was built without the feature `cuda`"),
            Self::Library {
                library,
                tried,
                help,
            } => {
                write!(f, "{library} cannot be loaded; tried")?;
                for (path, reason) in tried {
                    write!(f, "\n  {}: {reason}", path.display())?;
                }
                write!(f, "\n  help     {help}")
            }
            Self::Symbol { library, symbol } => write!(
                f,
                "{library} has no function {symbol}: another version of CUDA is needed (we use the \
                 functions of CUDA 12 and 13)"
            ),
            Self::NoDevice { ordinal, count } => {
                write!(f, "there is no CUDA device {ordinal}: found {count}")
            }
            Self::Target {
                driver,
                toolkit,
                sm,
                reason,
            } => write!(
                f,
                "no kernels for this device: driver for CUDA {}, NVRTC {}, compute capability {}.{}: {reason}",
                version(*driver),
                version(*toolkit),
                sm / 10,
                sm % 10
            ),
            Self::Compile {
                module,
                target,
                log,
            } => write!(f, "{module} does not compile for {target}:\n{log}"),
            Self::Call { what, reason } => write!(f, "{what}: {reason}"),
        }
    }
}

impl std::error::Error for CudaError {}

/// 13020 as `13.2`.
pub(crate) fn version(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
