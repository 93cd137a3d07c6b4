//! The command `ramet-bench`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    ramet_bench::main()
}
