//! The suite that any engine can run, on this one.

drivetrain_conformance::main!(drivetrain_fsdp::Fsdp);
