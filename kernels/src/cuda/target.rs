//! What to compile kernels to for a device: machine code where NVRTC can make it, PTX for newer devices.

use super::CudaError;
use super::error::version;

/// The oldest architecture the kernels are for, as 10 major + minor.
const OLDEST: u32 = 80;

/// The form in which the driver gets a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Machine code (CUBIN) for just this architecture.
    Cubin(u32),
    /// PTX for this architecture, which the driver compiles on for the device.
    Ptx(u32),
}

impl Target {
    /// Chooses for a driver that supports CUDA `driver` and an NVRTC of version `toolkit` (both 1000 major +
    /// 10 minor) that compiles for `architectures`, on a device of compute capability `sm`.
    ///
    /// Machine code runs under any driver of the same major version of CUDA or a newer one; PTX only under a
    /// driver at least as new as the compiler that made it.
    pub fn choose(
        driver: u32,
        toolkit: u32,
        architectures: &[u32],
        sm: u32,
    ) -> Result<Self, CudaError> {
        let refuse = |reason: String| CudaError::Target {
            driver,
            toolkit,
            sm,
            reason,
        };
        if sm < OLDEST {
            return Err(refuse(
                "the kernels need compute capability 8.0 or newer".to_owned(),
            ));
        }
        if architectures.contains(&sm) {
            return if driver / 1000 >= toolkit / 1000 {
                Ok(Self::Cubin(sm))
            } else {
                Err(refuse(format!(
                    "the driver takes no code of a newer CUDA: a driver for CUDA {}.0 or an NVRTC of CUDA {} is needed",
                    toolkit / 1000,
                    driver / 1000
                )))
            };
        }
        let older = architectures.iter().filter(|&&known| known < sm);
        let Some(&nearest) = older.max().filter(|&&nearest| nearest >= OLDEST) else {
            return Err(refuse(
                "this NVRTC compiles for none of 8.0 and newer".to_owned(),
            ));
        };
        if driver >= toolkit {
            Ok(Self::Ptx(nearest))
        } else {
            Err(refuse(format!(
                "this NVRTC does not know the device, and the driver takes no PTX of a newer CUDA: a driver for \
                 CUDA {} is needed, or an NVRTC that knows it",
                version(toolkit)
            )))
        }
    }

    /// As in the compiler's option `--gpu-architecture`.
    pub fn option(self) -> String {
        match self {
            Self::Cubin(sm) => format!("sm_{sm}"),
            Self::Ptx(sm) => format!("compute_{sm}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF_12_4: &[u32] = &[50, 52, 60, 70, 75, 80, 86, 87, 89, 90];
    const OF_13_0: &[u32] = &[75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];

    /// Known failure: PTX that is newer than the driver, found out at run time by the first launch.
    #[test]
    fn driver_toolkit_and_device_decide_together() {
        let choose = |driver, toolkit, sm| {
            let known = if toolkit < 13_000 { OF_12_4 } else { OF_13_0 };
            Target::choose(driver, toolkit, known, sm)
        };
        for (driver, toolkit, sm, expected) in [
            (13_000, 13_000, 80, Target::Cubin(80)),
            (13_000, 13_000, 90, Target::Cubin(90)),
            (13_020, 13_000, 100, Target::Cubin(100)),
            // Within a major version, machine code of a newer compiler runs under an older driver.
            (12_020, 12_040, 90, Target::Cubin(90)),
            (13_000, 12_040, 90, Target::Cubin(90)),
            // A device the compiler has not heard of takes the nearest PTX, if the driver is new enough.
            (12_080, 12_040, 100, Target::Ptx(90)),
            (13_000, 12_040, 120, Target::Ptx(90)),
            (13_030, 13_000, 130, Target::Ptx(121)),
        ] {
            assert_eq!(
                choose(driver, toolkit, sm),
                Ok(expected),
                "{driver} {toolkit} {sm}"
            );
        }
        for (driver, toolkit, sm, words) in [
            (
                12_040,
                13_000,
                90,
                "a driver for CUDA 13.0 or an NVRTC of CUDA 12",
            ),
            (12_020, 12_040, 100, "a driver for CUDA 12.4 is needed"),
            (13_000, 13_000, 75, "8.0 or newer"),
        ] {
            let text = choose(driver, toolkit, sm).unwrap_err().to_string();
            let all = [
                words.to_owned(),
                format!("driver for CUDA {}", version(driver)),
                format!("NVRTC {}", version(toolkit)),
                format!("compute capability {}.{}", sm / 10, sm % 10),
            ];
            for words in all {
                assert!(text.contains(&words), "{words:?} in {text:?}");
            }
        }
        assert!(Target::choose(13_000, 13_000, &[75], 90).is_err());
    }
}
