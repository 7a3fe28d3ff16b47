//! A folder with a job in it, and the program run on it.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use tempfile::TempDir;

/// Engines of this build that train with several ranks.
pub(crate) fn engines() -> Vec<&'static str> {
    let mut engines = Vec::new();
    if cfg!(feature = "fsdp") {
        engines.push("fsdp");
    }
    if cfg!(feature = "megatron") {
        engines.push("megatron");
    }
    assert!(
        !engines.is_empty(),
        "a build without an engine tests nothing"
    );
    engines
}

/// A Hugging Face folder of the golden set.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../conformance/golden")
        .join(name)
}

/// A temporary folder with data and a job.
pub(crate) struct Job {
    folder: TempDir,
}

impl Job {
    /// Twelve sequences of 3 to 20 tokens, and a job of 5 steps of 4 of them under megatron or fsdp.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let lines: Vec<String> = (0..12usize)
            .map(|i| {
                let tokens: Vec<usize> = (0..3 + (i * 7) % 18)
                    .map(|t| (i * 31 + t * 17) % 256)
                    .collect();
                let mask: Vec<u8> = (0..tokens.len()).map(|t| u8::from(t > 1)).collect();
                format!(r#"{{"tokens": {tokens:?}, "loss_mask": {mask:?}}}"#)
            })
            .collect();
        let job = Self { folder };
        job.write("data.jsonl", &lines.join("\n"));
        job.write(
            "job.yaml",
            &format!(
                "model: {}\nbackend: {}\nsteps: 5\noutput: run\ndata:\n  train: data.jsonl\nbatch:\n  \
                 global_batch_size: 4\noptimizer:\n  learning_rate: 1e-3\ncheckpoint:\n  every: 3\n  keep: 9\n",
                golden("llama_mha").display(),
                engines()[0],
            ),
        );
        job
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// Runs the program in the folder.
    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        self.run_with(arguments, &[])
    }

    /// The same, with some environment variables.
    pub(crate) fn run_with(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Ran {
        let program = Path::new(env!("CARGO_BIN_EXE_drivetrain"));
        self.run_program(program, arguments, variables)
    }

    /// Another program, likewise.
    pub(crate) fn run_program(
        &self,
        program: &Path,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Ran {
        let output = Command::new(program)
            .current_dir(self.folder.path())
            .args(arguments)
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        Ran(output)
    }

    /// The same, with its streams elsewhere.
    pub(crate) fn run_into(&self, arguments: &[&str], stdout: Stdio, stderr: Stdio) -> Ran {
        let mut command = self.command(arguments);
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        Ran(command.spawn().unwrap().wait_with_output().unwrap())
    }

    /// Starts it, and does not wait.
    pub(crate) fn start(&self, arguments: &[&str]) -> Running {
        let mut command = self.command(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Running(command.spawn().unwrap())
    }

    /// Starts it with these variables, and does not wait.
    #[cfg(feature = "gloo")]
    pub(crate) fn start_as(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Running {
        let mut command = self.command(arguments);
        command.envs(variables.iter().copied());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Running(command.spawn().unwrap())
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_drivetrain"));
        command.current_dir(self.folder.path()).args(arguments);
        command
    }

    /// Waits up to a minute until a file, or a folder (of which the text is empty), is as wanted.
    pub(crate) fn wait_for(&self, name: &str, wanted: impl Fn(&str) -> bool) {
        let began = std::time::Instant::now();
        while !self.path(name).exists()
            || !wanted(&std::fs::read_to_string(self.path(name)).unwrap_or_default())
        {
            assert!(
                began.elapsed().as_secs() < 60,
                "{name} is not there in a minute"
            );
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// A folder with a golden model, to be damaged or endangered.
    pub(crate) fn copy_model(&self, name: &str) -> PathBuf {
        let folder = self.path(name);
        std::fs::create_dir_all(&folder).unwrap();
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(golden("llama_mha").join(name), folder.join(name)).unwrap();
        }
        folder
    }

    /// A file's text.
    pub(crate) fn text(&self, name: &str) -> String {
        String::from_utf8(bytes(&self.path(name))).unwrap()
    }

    /// metrics.jsonl of a run: the value of a key in every line that has it.
    pub(crate) fn metric(&self, run: &str, key: &str) -> Vec<f64> {
        let text = std::fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        text.lines()
            .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap())
            .filter_map(|v| v[key].as_f64())
            .collect()
    }
}

/// The program, while it runs.
pub(crate) struct Running(Child);

impl Running {
    pub(crate) fn id(&self) -> String {
        self.0.id().to_string()
    }

    pub(crate) fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.id()]).status();
        assert!(sent.unwrap().success());
    }

    /// Signals it and waits for its end.
    pub(crate) fn kill(self, signal: &str) {
        self.signal(signal);
        self.0.wait_with_output().unwrap();
    }

    /// Waits for its end.
    pub(crate) fn ends(self) -> Ran {
        Ran(self.0.wait_with_output().unwrap())
    }
}

/// What the program did.
pub(crate) struct Ran(Output);

impl Ran {
    pub(crate) fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.0.stdout).into_owned()
    }

    pub(crate) fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.0.stderr).into_owned()
    }

    /// Exit code, with everything it said if it is another; never a panic.
    #[track_caller]
    pub(crate) fn exits(self, code: i32) -> Self {
        let all = format!("{}\n{}", self.stdout(), self.stderr());
        assert_eq!(self.0.status.code(), Some(code), "{all}");
        assert!(!all.contains("panicked"), "{all}");
        self
    }

    /// It said all of these on stderr.
    #[track_caller]
    pub(crate) fn says(self, parts: &[&str]) -> Self {
        let all = self.stderr();
        for part in parts {
            assert!(all.contains(part), "{part:?} is not in:\n{all}");
        }
        self
    }
}

/// Bytes of a file.
pub(crate) fn bytes(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}
