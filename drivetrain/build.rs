//! Lets this package's programs find libtorch where it is installed, if they are linked to it.

fn main() {
    drivetrain_libtorch_link::link();
}
