//! The report of NVIDIA's assembler: what each kernel takes.

/// What a kernel takes of a multiprocessor, as the assembler reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resources {
    /// The kernel.
    pub kernel: String,
    /// Registers a thread.
    pub registers: u32,
    /// Static shared memory a block, in bytes.
    pub shared_bytes: u32,
    /// Local memory a thread, in bytes: arrays that did not become registers.
    pub stack_bytes: u32,
    /// Bytes of registers that did not fit and are stored and loaded again.
    pub spill_bytes: u32,
}

impl Resources {
    /// Reads the assembler's report:
    ///
    /// ```text
    /// ptxas info    : Compiling entry function 'axpy' for 'sm_80'
    /// ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    /// ptxas info    : Used 16 registers, used 1 barriers, 64 bytes smem, 384 bytes cmem[0]
    /// ```
    pub fn of_log(log: &str) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for line in log.lines() {
            if let Some((_, after)) = line.split_once("Compiling entry function '") {
                let kernel = after.split('\'').next().unwrap_or_default().to_owned();
                all.push(Self {
                    kernel,
                    ..Self::default()
                });
                continue;
            }
            let Some(last) = all.last_mut() else {
                continue;
            };
            let before = |words: &str| -> Option<u32> {
                let head = &line[..line.find(words)?];
                head.trim_end()
                    .rsplit(|c: char| !c.is_ascii_digit())
                    .next()?
                    .parse()
                    .ok()
            };
            if let Some(registers) = before("registers") {
                last.registers = registers;
                last.shared_bytes = before("bytes smem").unwrap_or(0);
            }
            if let Some(stack) = before("bytes stack frame") {
                last.stack_bytes = stack;
                let spilled = [before("bytes spill stores"), before("bytes spill loads")];
                last.spill_bytes = spilled.into_iter().flatten().sum();
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_read_whatever_stands_around_it() {
        let log = "ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'f' for 'sm_80'
ptxas info    : Function properties for f
ptxas         .     368 bytes stack frame, 112 bytes spill stores, 100 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 368 bytes cumulative stack size, 384 bytes cmem[0]
ptxas info    : Compiling entry function 'g' for 'sm_80'
ptxas info    : Function properties for g
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, used 1 barriers, 8192 bytes smem, 420 bytes cmem[0]
";
        let expected = [
            Resources {
                kernel: "f".to_owned(),
                registers: 64,
                shared_bytes: 0,
                stack_bytes: 368,
                spill_bytes: 212,
            },
            Resources {
                kernel: "g".to_owned(),
                registers: 22,
                shared_bytes: 8192,
                ..Resources::default()
            },
        ];
        assert_eq!(Resources::of_log(log), expected);
    }
}
