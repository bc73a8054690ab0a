//! The `kvlab` program: parse, dispatch, one error line, exit code.

use std::process::ExitCode;

use clap::Parser;
use kvlab::cli::Cli;
use kvlab::commands::{Exit, dispatch, explain, is_broken_pipe};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let exit = match dispatch(&cli.command, &mut std::io::stdout().lock()) {
        Ok(exit) => exit,
        Err(e) if is_broken_pipe(&e) => Exit::Ok,
        Err(e) => {
            eprintln!("{}", explain(&e));
            Exit::Refused
        }
    };
    ExitCode::from(exit as u8)
}
