//! The oracle passes its own suite.

use drivetrain_conformance::oracle::ReferenceBackend;

drivetrain_conformance::main!(ReferenceBackend::new());
