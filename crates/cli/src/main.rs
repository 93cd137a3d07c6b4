//! The command `ramet`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    rametfs::main()
}
