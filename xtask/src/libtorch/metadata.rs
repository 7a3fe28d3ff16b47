//! Reads version pins out of a wheel's `METADATA` (core metadata, PEP 508 requirements).

/// The requirement (`name==version`, as pip takes it) by which a package pins `name`.
/// Extras and markers are dropped; an unpinned requirement is no pin.
pub(super) fn pin(metadata: &str, name: &str) -> Option<String> {
    metadata
        .lines()
        .take_while(|line| !line.is_empty()) // the description follows the headers
        .filter_map(|line| line.strip_prefix("Requires-Dist:"))
        .find_map(|requirement| {
            let bare = requirement.split(';').next()?;
            let (project, version) = bare.split_once("==")?;
            let project = project.split('[').next()?.trim().trim_end_matches('(');
            let version = version.trim().trim_end_matches(')');
            let plain = !version.is_empty() && !version.contains(',');
            (same_project(project, name) && plain).then(|| format!("{name}=={version}"))
        })
}

/// PEP 503: case and the choice of `-`, `_` and `.` do not matter.
fn same_project(a: &str, b: &str) -> bool {
    let normal = |name: &str| name.trim().to_lowercase().replace(['_', '.'], "-");
    normal(a) == normal(b)
}

#[cfg(test)]
mod tests {
    use super::pin;

    const TORCH: &str = "Metadata-Version: 2.1
Name: torch
Requires-Dist: filelock
Requires-Dist: setuptools<82
Requires-Dist: cuda-toolkit[cublas,cudart,cupti]==13.0.2; platform_system == \"Linux\"
Requires-Dist: cuda-bindings<14,>=13.0.3; platform_system == \"Linux\"
Requires-Dist: nvidia_nccl_cu13 (==2.28.9) ; platform_system == \"Linux\"

Requires-Dist: filelock==9.9 in the description
";

    #[test]
    fn pins_are_found_whatever_stands_around_them() {
        assert_eq!(pin(TORCH, "cuda-toolkit").unwrap(), "cuda-toolkit==13.0.2");
        assert_eq!(
            pin(TORCH, "nvidia-nccl-cu13").unwrap(),
            "nvidia-nccl-cu13==2.28.9"
        );
        let toolkit = "Requires-Dist: nvidia-cuda-runtime==13.0.96.*; (sys_platform == 'linux' or \
                       sys_platform == 'win32') and extra == 'cudart'\n";
        assert_eq!(
            pin(toolkit, "nvidia-cuda-runtime").unwrap(),
            "nvidia-cuda-runtime==13.0.96.*"
        );
    }

    #[test]
    fn what_is_not_pinned_has_no_pin() {
        for name in ["filelock", "setuptools", "cuda-bindings", "cuda", "torch"] {
            assert_eq!(pin(TORCH, name), None, "{name}");
        }
    }
}
