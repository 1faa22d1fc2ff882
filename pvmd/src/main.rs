//! `pvmd`, the daemon of one host of a virtual machine.

fn main() -> std::process::ExitCode {
    let status = pvmd::shell::cli::main();
    std::process::ExitCode::from(u8::try_from(status).unwrap_or(1))
}
