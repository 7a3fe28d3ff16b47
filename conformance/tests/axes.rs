//! The cases of layouts that split the model, on an oracle that claims every axis: they run, and pass. That they fail
//! where something is wrong the mutants show.

use std::{process::ExitCode, sync::Arc};

use drivetrain_conformance::{oracle::ReferenceBackend, suite::Suite};

fn main() -> ExitCode {
    Suite::new(vec![Arc::new(ReferenceBackend::replicated())])
        .groups(&[
            "layouts/dense/cp",
            "layouts/tied/tp",
            "layouts/tied/pp",
            "layouts/mixtral/ep",
            "many_layouts/",
            "state/dense",
            "checkpoint/tied/tp",
            "checkpoint/tied/pp",
            "uneven/",
            "lost_rank/",
        ])
        .at_least(260)
        .main()
}
