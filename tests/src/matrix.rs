//! Runs Debian's PVM programs, and the examples built from Debian's sources, on PVM 3.4.6 and on
//! Sempa. Compares their output without times and tids.

use crate::real_pvm::RealVm;
use crate::run::{CommandResult, RunningCommand, run, wait_for};
use crate::vm::{Settings, Vm};
use crate::{Host, Testbed, pvm_examples, requirements};
use anyhow::{Context, Result, bail};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time limit for one program on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(40);
/// Number of times a run on PVM is tried, because PVM itself sometimes fails.
const PVM_ATTEMPTS_MAX: usize = 3;
/// Number of hosts of each virtual machine.
const HOSTS: usize = 3;
/// The smallest number that counts as a tid.
const TID_MIN: u64 = 0x40000;

/// The output of a case, or the reason why there is no output.
pub type CaseOutput = Result<String, String>;

/// A system, and the programs that run on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// PVM 3.4.6 with Debian's programs.
    Pvm,
    /// Sempa with Debian's programs.
    SempaDebianPrograms,
    /// Sempa with PVM's examples, built with our headers and libraries, and with Debian's other
    /// programs.
    SempaBuiltPrograms,
}

/// A virtual machine of three hosts.
#[derive(Debug)]
pub struct ComparedVm<'a> {
    bed: &'a Testbed,
    vm: RealOrSempa<'a>,
    /// The folder that is searched for programs first.
    programs: PathBuf,
}

#[derive(Debug)]
enum RealOrSempa<'a> {
    Real(RealVm<'a>),
    Ours(Vm<'a>),
}

/// A program with arguments and standard input, to be run on a host.
#[derive(Clone, Copy, Debug)]
pub struct ProgramRun<'a> {
    /// Number of the host, counted from 1.
    pub host: usize,
    /// Name of the program, found in the search path.
    pub program: &'a str,
    pub words: &'a [&'a str],
    pub input: &'a str,
}

/// Returns a run of `program` on h1 without arguments and input.
pub fn without_arguments(program: &str) -> ProgramRun<'_> {
    ProgramRun {
        host: 1,
        program,
        words: &[],
        input: "",
    }
}

/// Returns a run of `program` on h1 with these arguments and without input.
pub fn with_arguments<'a>(program: &'a str, words: &'a [&'a str]) -> ProgramRun<'a> {
    ProgramRun {
        words,
        ..without_arguments(program)
    }
}

impl ComparedVm<'_> {
    /// Returns a command that runs `program` on a host with the environment of this virtual
    /// machine.
    pub fn command(&self, host: &Host, program: impl AsRef<Path>) -> Command {
        match &self.vm {
            RealOrSempa::Real(vm) => vm.command(host, program),
            RealOrSempa::Ours(vm) => vm.command(host, program),
        }
    }

    /// As [`ComparedVm::command`], for one of Debian's programs; its output is line buffered.
    fn line_buffered_command(&self, host: &Host, program: &str) -> Command {
        let mut command = self.command(host, "/usr/bin/stdbuf");
        command
            .arg("-oL")
            .arg(program_path(&self.programs, program));
        command
    }

    pub fn bed(&self) -> &Testbed {
        self.bed
    }

    /// Starts a program and returns without waiting for its end.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(&self, shell: ProgramRun) -> Result<RunningCommand> {
        self.start_with(shell, |_| {})
    }

    /// As [`ComparedVm::start`]. Calls `change` with the command before the start.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start_with(
        &self,
        shell: ProgramRun,
        change: impl FnOnce(&mut Command),
    ) -> Result<RunningCommand> {
        let mut command = self.line_buffered_command(self.bed.host(shell.host), shell.program);
        command.args(shell.words);
        change(&mut command);
        if shell.input.is_empty() {
            return RunningCommand::start(command, Stdio::null());
        }
        let mut running = RunningCommand::start(command, Stdio::piped())?;
        let mut pipe = running.take_stdin().context("its input is piped")?;
        pipe.write_all(shell.input.as_bytes())?;
        Ok(running)
    }

    /// Runs a program to its end. Returns its output, exit status and error output as one text.
    ///
    /// # Errors
    /// The program does not start or does not end.
    pub fn run(&self, shell: ProgramRun) -> Result<String> {
        Ok(self.text(&self.start(shell)?.finish(TIMEOUT)?))
    }

    /// Returns output, exit status and error output as one text. The path of the testbed's folder
    /// is masked, and paths of built programs are replaced by Debian's.
    pub fn text(&self, done: &CommandResult) -> String {
        let status = done
            .status
            .code()
            .map_or_else(|| done.status.to_string(), |code| format!("exit {code}"));
        let all = format!("{}\n[{status}]\n{}", done.out, done.err);
        let all = all.replace(&format!("{}/", self.programs.display()), "/usr/bin/");
        all.replace(&self.bed.folder().display().to_string(), "FOLDER")
    }

    /// Passes commands to Debian's console, waits until its output contains `until`, and passes
    /// `quit`. Returns all output.
    ///
    /// # Errors
    /// The output never contains `until`, or the console fails.
    pub fn console(&self, commands: &str, until: &str) -> Result<String> {
        let command = self.line_buffered_command(self.bed.host(1), "pvm");
        let mut running = RunningCommand::start(command, Stdio::piped())?;
        let mut pipe = running.take_stdin().context("its input is piped")?;
        pipe.write_all(commands.as_bytes())?;
        wait_for(TIMEOUT, || match running.out_so_far() {
            Ok(out) if out.contains(until) => Ok(()),
            other => Err(format!("no {until:?} in: {other:?}")),
        })?;
        if let Err(error) = pipe.write_all(b"quit\n") {
            bail!(
                "the console takes nothing more: {error}; {:?}",
                running.finish(TIMEOUT)?
            );
        }
        drop(pipe);
        Ok(self.text(&running.finish(TIMEOUT)?))
    }

    /// Waits until a running program has printed `words`.
    ///
    /// # Errors
    /// The words are not printed within the time limit.
    pub fn wait_until_printed(&self, running: &RunningCommand, words: &str) -> Result<()> {
        wait_for(TIMEOUT, || match running.out_so_far() {
            Ok(out) if out.contains(words) => Ok(()),
            other => Err(format!("no {words:?} in {other:?}")),
        })
    }

    /// Waits until a program that was started from a command line has connected. The console that
    /// checks this does not count.
    ///
    /// # Errors
    /// No program connects within the time limit.
    pub fn wait_for_connection(&self) -> Result<()> {
        wait_for(TIMEOUT, || match self.console("ps -ax\n", "\n") {
            Ok(out)
                if out
                    .lines()
                    .any(|line| line.contains("4/c -") && !line.contains("(cons)")) =>
            {
                Ok(())
            }
            other => Err(format!("nothing has connected: {other:?}")),
        })
    }

    /// Waits until the mailbox contains `name`.
    ///
    /// # Errors
    /// The name is not in the mailbox within the time limit.
    pub fn wait_until_in_mailbox(&self, name: &str) -> Result<()> {
        wait_for(TIMEOUT, || match self.run(without_arguments("gmbi")) {
            Ok(out) if out.contains(name) => Ok(()),
            other => Err(format!("no {name:?} in {other:?}")),
        })
    }

    /// Waits until a command of Debian's console prints `words`. The command is repeated.
    ///
    /// # Errors
    /// The words are not printed within the time limit.
    pub fn wait_until_console_shows(&self, command: &str, words: &str) -> Result<()> {
        wait_for(TIMEOUT, || match self.console(command, "\n") {
            Ok(out)
                if out
                    .split_whitespace()
                    .collect::<Vec<_>>()
                    .join(" ")
                    .contains(words) =>
            {
                Ok(())
            }
            other => Err(format!("no {words:?} in {other:?}")),
        })
    }

    fn halt(self) -> Result<()> {
        match self.vm {
            RealOrSempa::Real(vm) => vm.halt(),
            RealOrSempa::Ours(vm) => vm.halt(),
        }
    }
}

/// Runs the cases of `what` on several systems in parallel, each on three hosts. Returns the
/// results of each system.
///
/// # Panics
/// The machine lacks something, a system does not start, or `what` fails.
pub fn run_on_systems<const N: usize>(
    systems: [System; N],
    what: impl Fn(&ComparedVm) -> Result<Vec<CaseOutput>> + Sync,
) -> [Vec<CaseOutput>; N] {
    requirements::require(requirements::lacks());
    if systems.contains(&System::SempaBuiltPrograms) {
        requirements::require(pvm_examples::lacks());
    }
    std::thread::scope(|scope| {
        let what = &what;
        let running =
            systems.map(|system| (system, scope.spawn(move || run_on_system(system, what))));
        running.map(|(system, thread)| match thread.join() {
            Ok(Ok(heard)) => heard,
            Ok(Err(error)) => panic!("{system:?}: {error:#}"),
            Err(_) => panic!("{system:?}: a panic in its run"),
        })
    })
}

fn run_on_system(
    system: System,
    what: &dyn Fn(&ComparedVm) -> Result<Vec<CaseOutput>>,
) -> Result<Vec<CaseOutput>> {
    if system == System::Pvm {
        return run_on_pvm_with_retries(what);
    }
    let prefix = requirements::prefix()?;
    let bed = Testbed::new(HOSTS, Some(&prefix), &[])?;
    if system == System::SempaBuiltPrograms {
        pvm_examples::build(&prefix, &own_programs(&bed))?;
    }
    let programs = link_programs(&bed)?;
    let vm = Vm::start(&bed, Settings::default())?;
    vm.add(&["h2", "h3"])?;
    run_and_halt(
        ComparedVm {
            bed: &bed,
            vm: RealOrSempa::Ours(vm),
            programs,
        },
        what,
    )
}

/// Runs the cases on PVM; repeats the run if PVM fails.
///
/// The first task that joins a group starts PVM's group server. On a loaded machine tasks that join
/// at the same time start several servers. All but one of the servers end, and the tasks that have
/// sent requests to those fail ("Could not join group").
fn run_on_pvm_with_retries(
    what: &dyn Fn(&ComparedVm) -> Result<Vec<CaseOutput>>,
) -> Result<Vec<CaseOutput>> {
    for _ in 1..PVM_ATTEMPTS_MAX {
        let error = match run_on_pvm(what) {
            Ok(heard) => match heard.iter().find_map(|case| case.as_ref().err()) {
                Some(error) => error.clone(),
                None => return Ok(heard),
            },
            Err(error) => format!("{error:#}"),
        };
        eprintln!("PVM 3.4.6 failed itself, it is run again: {error}");
    }
    run_on_pvm(what)
}

fn run_on_pvm(what: &dyn Fn(&ComparedVm) -> Result<Vec<CaseOutput>>) -> Result<Vec<CaseOutput>> {
    let bed = Testbed::new(HOSTS, None, &[])?;
    let programs = link_programs(&bed)?;
    let vm = RealVm::start(&bed)?;
    let mut add = RunningCommand::start(vm.command(bed.host(1), "/usr/bin/pvm"), Stdio::piped())?;
    add.take_stdin()
        .context("its input is piped")?
        .write_all(b"add h2 h3\n")?;
    let added = add.finish(TIMEOUT)?;
    if !added.out.contains("2 successful") {
        bail!("{added:?}");
    }
    run_and_halt(
        ComparedVm {
            bed: &bed,
            vm: RealOrSempa::Real(vm),
            programs,
        },
        what,
    )
}

fn run_and_halt(
    machine: ComparedVm,
    what: &dyn Fn(&ComparedVm) -> Result<Vec<CaseOutput>>,
) -> Result<Vec<CaseOutput>> {
    let result = what(&machine);
    if let (Err(error), RealOrSempa::Ours(vm)) = (&result, &machine.vm) {
        eprintln!("{error:#}\n{}", vm.logs());
    }
    let halted = machine.halt();
    let result = result?;
    halted.map(|()| result)
}

/// Returns the folder of the programs that are built here. The folder may not exist.
fn own_programs(bed: &Testbed) -> PathBuf {
    bed.folder().join("built")
}

/// Returns the path of a program: in `programs` if it exists there, otherwise Debian's.
fn program_path(programs: &Path, name: &str) -> PathBuf {
    let own = programs.join(name);
    if own.exists() {
        own
    } else {
        Path::new("/usr/bin").join(name)
    }
}

fn link_programs(bed: &Testbed) -> Result<PathBuf> {
    let (place, programs) = (bed.home().join("pvm3/bin/LINUX64"), own_programs(bed));
    let listed = run(
        {
            let mut list = Command::new("dpkg-query");
            list.args(["-L", "pvm-examples"]);
            list
        },
        TIMEOUT,
    )?;
    let own = listed
        .out
        .lines()
        .filter_map(|line| line.strip_prefix("/usr/bin/"));
    for name in own.chain(["pvmgs"]) {
        symlink(program_path(&programs, name), place.join(name))
            .with_context(|| name.to_string())?;
    }
    let slang = Path::new("/usr/share/doc/slang-pvm/examples");
    for name in ["hello_master", "hello_slave", "master", "slave"] {
        let Ok(script) = fs::read_to_string(slang.join(name)) else {
            continue;
        };
        let copy = bed.home().join(name);
        // The script contains the name of its author's host.
        fs::write(&copy, script.replace("\"pirx\"", "\"h2\""))?;
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o755))?;
    }
    Ok(programs)
}

/// The form in which two texts are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// All lines in order; tids are masked.
    Lines,
    /// All lines in any order; tids are masked.
    Sorted,
    /// All lines in order; all numbers are masked.
    Shapes,
    /// The set of lines; all numbers are masked.
    Kinds,
}

/// Returns a text in the form in which `how` compares it.
pub fn normalize(text: &str, how: Comparison) -> String {
    let all = matches!(how, Comparison::Shapes | Comparison::Kinds);
    let any_order = matches!(how, Comparison::Sorted | Comparison::Kinds);
    // The console's prompt may precede output that arrives at any time.
    let bare = |line: String| {
        if any_order {
            line.trim_start_matches("pvm> ").to_string()
        } else {
            line
        }
    };
    let lines = text.lines().map(|line| bare(mask_numbers(line, all)));
    let mut lines: Vec<String> = lines
        .filter(|line| !line.is_empty() && line != "pvm>")
        .collect();
    if any_order {
        lines.sort();
    }
    if how == Comparison::Kinds {
        lines.dedup();
    }
    lines.join("\n")
}

/// Returns a line with single blanks and masked tids. A tid is `t` or `0x` with hexadecimal digits,
/// or a large decimal number. If `all` is true, masks all numbers.
fn mask_numbers(line: &str, all: bool) -> String {
    let mut out = String::new();
    let bytes: Vec<char> = line
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .chars()
        .collect();
    let mut at = 0;
    while at < bytes.len() {
        let before = if at == 0 { ' ' } else { bytes[at - 1] };
        let rest = &bytes[at..];
        let hex = |skip: usize| {
            rest[skip..]
                .iter()
                .take_while(|one| one.is_ascii_hexdigit())
                .count()
        };
        let (skip, digits) = match rest {
            ['0', 'x', first, ..] if *first != '0' && hex(2) >= 5 => (2, hex(2)),
            _ if out.ends_with("id: ") && hex(0) >= 5 => (0, hex(0)),
            ['t', ..] if !before.is_alphanumeric() && hex(1) >= 5 => (1, hex(1)),
            _ => (0, 0),
        };
        if digits > 0 {
            out.push_str("TID");
            at += skip + digits;
            continue;
        }
        let decimal = rest.iter().take_while(|one| one.is_ascii_digit()).count();
        if decimal > 0 && !before.is_alphabetic() {
            let number: String = rest[..decimal].iter().collect();
            let fraction = if all {
                fraction_length(&rest[decimal..])
            } else {
                0
            };
            let is_tid = number
                .parse::<u64>()
                .is_ok_and(|value| (TID_MIN..1 << 30).contains(&value));
            out.push_str(if all {
                "N"
            } else if is_tid {
                "TID"
            } else {
                &number
            });
            at += decimal + fraction;
            continue;
        }
        out.push(bytes[at]);
        at += 1;
    }
    out
}

/// Returns the length of the fraction and exponent after the integer part of a number: `.5`,
/// `.5e-03`.
fn fraction_length(rest: &[char]) -> usize {
    let digits = |from: usize| {
        rest.get(from..)
            .unwrap_or(&[])
            .iter()
            .take_while(|one| one.is_ascii_digit())
            .count()
    };
    let point = if rest.first() == Some(&'.') {
        1 + digits(1)
    } else {
        0
    };
    match rest.get(point..) {
        Some(['e' | 'E', '+' | '-', ..]) => point + 2 + digits(point + 2),
        _ => point,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tids_are_masked_and_other_numbers_stay() {
        let line = "from t80001:  hello 0x40003 262146 tid: 4000a from h2, 700.5 of 0x2 time";
        assert_eq!(
            normalize(line, Comparison::Lines),
            "from TID: hello TID TID tid: TID from h2, 700.5 of 0x2 time"
        );
    }

    #[test]
    fn shapes_have_no_numbers_but_names_keep_theirs() {
        assert_eq!(
            normalize(
                "  0:  1 bytes  77 times --> 1.5e-03 Mbps h2",
                Comparison::Shapes
            ),
            "N: N bytes N times --> N Mbps h2"
        );
    }

    #[test]
    fn kinds_are_each_line_once_in_any_order() {
        assert_eq!(normalize("b 1\na 2\nb 3\n", Comparison::Kinds), "a N\nb N");
    }
}
