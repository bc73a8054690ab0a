//! Where a run was made: program, machine, moment.
//!
//! Invariants: captured before work; [`Environment::engine`] names everything here that may change a number, so that
//! two runs go into one bundle only if it is equal; nothing here enters a table.

use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::data::sha256_hex;

/// Program, machine and moment of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Environment {
    /// What may change numbers.
    pub engine: Engine,
    /// Compiler, as the executable's own note gives it; unknown for a stripped one.
    pub rustc: Option<String>,
    /// Commit of the checkout that the executable lies in; `+` marks uncommitted changes.
    pub source_commit: Option<String>,
    /// The command line, the program without its path.
    pub command: Vec<String>,
    /// Start, UTC, ISO 8601.
    pub started_at: String,
    /// Operating system and, where known, its release.
    pub os: String,
    /// The processor's name.
    pub cpu_model: Option<String>,
    /// Threads that may run at once.
    pub n_cores: usize,
    /// Physical memory, bytes.
    pub memory_bytes: Option<u64>,
    /// Load averages over 1, 5 and 15 minutes at the start: a busy machine's times mean little.
    pub load_average: Option<[f64; 3]>,
}

/// The part of the environment that may change numbers: the program and the machine's class.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Engine {
    /// Version of this program.
    pub kvlab_version: String,
    /// SHA-256 of the executable, hexadecimal.
    pub executable_sha256: String,
    /// Processor architecture.
    pub arch: String,
    /// The processor's vector extensions, of those that kernels dispatch on.
    pub cpu_flags: Vec<String>,
}

impl Environment {
    /// Looks at the running program and its machine. What can't be found out is `None`.
    ///
    /// # Errors
    /// The executable can't be read.
    pub fn capture() -> std::io::Result<Self> {
        let executable = std::env::current_exe()?;
        let program = std::fs::read(&executable)?;
        let cpu_info = read_proc("/proc/cpuinfo");
        Ok(Self {
            engine: Engine {
                kvlab_version: env!("CARGO_PKG_VERSION").to_owned(),
                executable_sha256: sha256_hex(&program),
                arch: std::env::consts::ARCH.to_owned(),
                cpu_flags: cpu_flags(),
            },
            rustc: compiler_note(&program),
            source_commit: executable.parent().and_then(checkout_commit),
            command: named(std::env::args()),
            started_at: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or_else(|_| "unknown".to_owned(), |d| iso_8601(d.as_secs())),
            os: [
                std::env::consts::OS,
                read_proc("/proc/sys/kernel/osrelease").trim(),
            ]
            .join(" ")
            .trim()
            .to_owned(),
            cpu_model: field(&cpu_info, "model name").map(str::to_owned),
            n_cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
            memory_bytes: memory_bytes(&read_proc("/proc/meminfo")),
            load_average: load_average_now(),
        })
    }
}

/// A command line whose program has its name alone: where it lies is a matter of one machine.
pub fn named(arguments: impl Iterator<Item = String>) -> Vec<String> {
    let mut command: Vec<String> = arguments.collect();
    if let Some(program) = command.first_mut()
        && let Some(name) = Path::new(program.as_str()).file_name()
    {
        *program = name.to_string_lossy().into_owned();
    }
    command
}

/// Load averages over 1, 5 and 15 minutes now.
pub fn load_average_now() -> Option<[f64; 3]> {
    load_average(&read_proc("/proc/loadavg"))
}

fn read_proc(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// The value of the first `key : value` line.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.trim() == key)
        .map(|(_, value)| value.trim())
}

fn memory_bytes(mem_info: &str) -> Option<u64> {
    let kib = field(mem_info, "MemTotal")?.strip_suffix("kB")?.trim();
    Some(kib.parse::<u64>().ok()? * 1024)
}

fn load_average(text: &str) -> Option<[f64; 3]> {
    let mut numbers = text.split_whitespace().map(|word| word.parse().ok());
    Some([numbers.next()??, numbers.next()??, numbers.next()??])
}

#[cfg(target_arch = "x86_64")]
fn cpu_flags() -> Vec<String> {
    let known = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    known
        .iter()
        .filter(|(_, present)| *present)
        .map(|(name, _)| (*name).to_owned())
        .collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_flags() -> Vec<String> {
    Vec::new()
}

/// The `rustc version ...` note that the compiler leaves in an executable's comment section.
fn compiler_note(program: &[u8]) -> Option<String> {
    const START: &[u8] = b"rustc version ";
    program
        .windows(START.len() + 1)
        .position(|w| w.starts_with(START) && w[START.len()].is_ascii_digit())
        .map(|at| {
            let text = &program[at + START.len()..];
            let end = text
                .iter()
                .position(|b| !(b.is_ascii_graphic() || *b == b' '))
                .unwrap_or(text.len());
            String::from_utf8_lossy(&text[..end]).into_owned()
        })
}

fn checkout_commit(folder: &Path) -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git")
            .arg("-C")
            .arg(folder)
            .args(arguments)
            .output()
            .ok()?;
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "HEAD"])?;
    let changes = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changes.is_empty() {
        commit
    } else {
        format!("{commit}+")
    })
}

/// Seconds since 1970 as a UTC date (H. Hinnant's civil-from-days, proleptic Gregorian calendar).
fn iso_8601(unix_s: u64) -> String {
    let (days, second) = (unix_s / 86_400, unix_s % 86_400);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(iso_8601(0), "1970-01-01T00:00:00Z");
        assert_eq!(iso_8601(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(iso_8601(1_767_225_599), "2025-12-31T23:59:59Z");
        assert_eq!(iso_8601(4_107_542_400), "2100-03-01T00:00:00Z");
    }

    #[test]
    fn a_command_has_no_place_of_its_program() {
        let command = ["/opt/x/kvlab", "run", "a/b.toml"].map(str::to_owned);
        assert_eq!(named(command.into_iter()), ["kvlab", "run", "a/b.toml"]);
        assert_eq!(named(std::iter::empty()), [""; 0]);
    }

    #[test]
    fn proc_files() {
        let cpu = "processor\t: 0\nmodel name\t: Some CPU @ 2: GHz\n";
        assert_eq!(field(cpu, "model name"), Some("Some CPU @ 2: GHz"));
        assert_eq!(memory_bytes("MemTotal:   24 kB\n"), Some(24 * 1024));
        assert_eq!(memory_bytes(""), None);
        assert_eq!(load_average("0.5 1.25 2 3/4 5"), Some([0.5, 1.25, 2.0]));
        assert_eq!(load_average("0.5 x"), None);
    }

    #[test]
    fn compiler_note_ends_at_its_section() {
        let program = b"..rustc version %s..rustc version 1.95.0 (abc 2026-04-14)\0GCC";
        assert_eq!(
            compiler_note(program).as_deref(),
            Some("1.95.0 (abc 2026-04-14)")
        );
        assert_eq!(compiler_note(b"nothing"), None);
    }

    #[test]
    fn this_program_is_identified() {
        let environment = Environment::capture().unwrap();
        assert_eq!(environment.engine.executable_sha256.len(), 64);
        assert_eq!(environment.engine, Environment::capture().unwrap().engine);
        let text = serde_json::to_string(&environment).unwrap();
        let back: Environment = serde_json::from_str(&text).unwrap();
        assert_eq!(back, environment);
    }
}
