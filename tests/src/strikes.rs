//! Faults, whom they meet, and where: daemons stand still at a step of a move, of a checkpoint or of a restart, and then the fault
//! comes.

use crate::liar;
use crate::run::eventually;
use crate::testbed::{Host, Testbed};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::migration::Step;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Nobody is lost of a fault that lasts so long: what comes before it and after it takes seconds on a loaded machine, and all of
/// it is well below the usual silence after which a host is lost.
pub const A_MOMENT: Duration = Duration::from_secs(1);
/// The same for longer.
pub const A_WHILE: Duration = Duration::from_secs(5);
/// Longer than the usual silence after which a host is lost.
pub const UNTIL_LOST: Duration = Duration::from_secs(14);
/// Much longer.
pub const VERY_LONG: Duration = Duration::from_secs(30);
/// Time for a killed process to be dead, and for a fault to be over.
const LONG: Duration = Duration::from_secs(120);

/// Has everything tried that there is: each fault on each party at each place. Otherwise they share the places out.
const FULL: &str = "SEMPA_TEST_FULL";

/// Everything is to be tried.
pub fn is_full() -> bool {
    std::env::var_os(FULL).is_some_and(|value| !value.is_empty())
}

/// Which end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Edge {
    /// Nothing of it is done.
    Before,
    /// Nobody has been told that it is done.
    After,
}

impl Edge {
    fn word(self) -> &'static str {
        match self {
            Edge::Before => "before-",
            Edge::After => "",
        }
    }

    pub(crate) fn of(number: usize) -> Edge {
        if number.is_multiple_of(2) {
            Edge::Before
        } else {
            Edge::After
        }
    }
}

/// A place in the course of a move, of a checkpoint, or of a restart.
pub type Point = (Step, Edge);

/// Both ends of these steps.
pub(crate) fn ends(steps: impl IntoIterator<Item = Step>) -> impl Iterator<Item = Point> {
    steps
        .into_iter()
        .flat_map(|step| [(step, Edge::Before), (step, Edge::After)])
}

/// Where a daemon is to stand still. It tells that it does by the name of a file.
#[derive(Debug)]
pub struct Halt {
    wanted: PathBuf,
}

impl Halt {
    /// Has the daemon stand still that comes to this place with this task, from now on. `folder`: [`Testbed::steps`].
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(folder: &Path, tid: &str, point: Point) -> Result<Halt> {
        let wanted = folder.join(format!("{tid}-{}", name(point)));
        fs::write(&wanted, "")?;
        Ok(Halt { wanted })
    }

    /// Has nobody stand still there who has not come there yet.
    pub fn give_up(&self) {
        // It is not there if somebody stands there.
        let _ = fs::remove_file(&self.wanted);
    }

    /// The daemon of one of these hosts that stands there; none if it has not come there yet.
    ///
    /// # Errors
    /// It has come there, and does not stand yet.
    pub fn who_stands(&self, hosts: &[&Host]) -> Result<Option<Pid>, String> {
        if !self.wanted.with_extension("reached").exists() {
            return Ok(None);
        }
        let mut daemons = hosts.iter().filter_map(|host| daemon_of(host));
        let stands = daemons
            .find(|pid| is_stopped(*pid))
            .ok_or(format!("nobody stands at {:?}", self.wanted))?;
        Ok(Some(stands))
    }
}

/// The places that daemons come to with a task.
#[derive(Debug)]
pub struct Passed {
    file: PathBuf,
}

impl Passed {
    /// From now on. `folder`: [`Testbed::steps`].
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(folder: &Path, tid: &str) -> Result<Passed> {
        let file = folder.join(format!("{tid}-places"));
        fs::write(&file, "")?;
        Ok(Passed { file })
    }

    /// Those so far. It begins anew after that.
    ///
    /// # Errors
    /// The file cannot be read, or names a place that there is not.
    pub fn take(&self) -> Result<BTreeSet<Point>> {
        let text = fs::read_to_string(&self.file)?;
        fs::write(&self.file, "")?;
        let all: BTreeMap<String, Point> =
            ends(Step::ALL).map(|point| (name(point), point)).collect();
        text.lines()
            .map(|line| {
                all.get(line)
                    .copied()
                    .with_context(|| format!("no place: {line}"))
            })
            .collect()
    }
}

/// As the daemons name it.
fn name((step, edge): Point) -> String {
    format!("{}{step}", edge.word())
}

/// What a fault meets on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    /// Its daemon.
    Daemon,
    /// Its tasker.
    Tasker,
    /// What its tasker has started of CRIU, or what is there in its place, if anything works at that moment.
    Engine,
    /// The resource manager, if it is there.
    ResourceManager,
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, and SIGCONT after so long.
    Stop(Duration),
    /// Its host hears nothing and is not heard for so long.
    Cut(Duration),
    /// Source and target do not hear each other for so long; all others hear both.
    Part(Duration),
}

/// Lets the fault meet these parties, each on a host of this number, or have these pairs of hosts not hear each other; then lets
/// those go on who are held, with `go_on`, which is told whom it must leave alone; and waits until the fault is over. How many
/// engines were met.
///
/// # Errors
/// A process is not there, or the kernel refuses.
pub fn strike(
    bed: &Testbed,
    parties: &[(usize, Party)],
    pairs: &[(usize, usize)],
    fault: Fault,
    go_on: impl FnOnce(&[Pid]) -> Result<()>,
) -> Result<usize> {
    let (mut victims, mut engines) = (Vec::new(), 0);
    match fault {
        Fault::Kill | Fault::Stop(_) => {
            for &(host, party) in parties {
                let found = processes_of(bed.host(host), party);
                let is_engine = party == Party::Engine;
                ensure!(!found.is_empty() || is_engine, "no {party:?} on h{host}");
                engines += if is_engine { found.len() } else { 0 };
                victims.extend(found);
            }
        }
        Fault::Cut(_) => parties
            .iter()
            .try_for_each(|(host, _)| bed.plug(*host, false))?,
        Fault::Part(_) => pairs.iter().try_for_each(|(i, j)| bed.part(*i, *j, true))?,
    }
    // One process may be meant several times.
    victims.sort();
    victims.dedup();
    let met = if fault == Fault::Kill {
        Signal::SIGKILL
    } else {
        Signal::SIGSTOP
    };
    let ends_by_itself = parties.iter().all(|(_, party)| *party == Party::Engine);
    let tell = |pid: Pid, what| {
        signal(pid, what).or_else(|e| if ends_by_itself { Ok(()) } else { Err(e) })
    };
    victims.iter().try_for_each(|pid| tell(*pid, met))?;
    let begun = Instant::now();
    // On a loaded machine who is killed may take a while to die: whoever goes on before could leave the step behind until then.
    if fault == Fault::Kill {
        victims.iter().copied().try_for_each(dies)?;
    }
    go_on(&victims)?;
    let (Fault::Stop(long) | Fault::Cut(long) | Fault::Part(long)) = fault else {
        return Ok(engines);
    };
    eventually(long + LONG, || {
        if begun.elapsed() >= long {
            Ok(())
        } else {
            Err("not over".to_string())
        }
    })?;
    victims
        .into_iter()
        .try_for_each(|pid| tell(pid, Signal::SIGCONT))?;
    match fault {
        Fault::Cut(_) => parties
            .iter()
            .try_for_each(|(host, _)| bed.plug(*host, true))?,
        Fault::Part(_) => pairs
            .iter()
            .try_for_each(|(i, j)| bed.part(*i, *j, false))?,
        Fault::Kill | Fault::Stop(_) => {}
    }
    Ok(engines)
}

/// Sends a signal.
///
/// # Errors
/// The kernel refuses, or there is no such process.
pub fn signal(pid: Pid, signal: Signal) -> Result<()> {
    kill(pid, signal).with_context(|| format!("{signal} to {pid}"))
}

/// The daemon of a host.
pub fn daemon_of(host: &Host) -> Option<Pid> {
    let daemon = host
        .processes()
        .into_iter()
        .find(|(_, line)| line.contains("bin/pvmd"))?;
    Some(Pid::from_raw(daemon.0.cast_signed()))
}

/// The processes that play this part on a host: one, but for engines.
pub fn processes_of(host: &Host, party: Party) -> Vec<Pid> {
    let Some(daemon) = daemon_of(host) else {
        return Vec::new();
    };
    let those = |is_one: &dyn Fn(Pid, &str) -> bool| {
        let all = host
            .processes()
            .into_iter()
            .map(|(pid, line)| (Pid::from_raw(pid.cast_signed()), line));
        all.filter(|(pid, line)| is_one(*pid, line))
            .map(|(pid, _)| pid)
            .collect::<Vec<_>>()
    };
    let one = |found: Vec<Pid>| found.into_iter().take(1).collect();
    match party {
        Party::Daemon => vec![daemon],
        // It has children of the same name.
        Party::Tasker => one(those(&|pid, line| {
            line.contains("pvm-tasker")
                && field(pid, "PPid:").is_some_and(|parent| parent == daemon.to_string())
        })),
        Party::ResourceManager => one(those(&|_, line| line.contains("bin/pvm-rm"))),
        // By the program that it runs: it is started by a link that has another name.
        Party::Engine => those(&|pid, line| {
            let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            program.ends_with("criu") || (program.ends_with("bash") && liar::is_engine(line))
        }),
    }
}

/// What moves, checkpoints and restarts have left on a host: images and tokens.
pub fn left_on(host: &Host) -> Vec<String> {
    let entries = fs::read_dir(host.path("/tmp/sempa-0/pvm"))
        .into_iter()
        .flatten()
        .flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_left = |name: &String| {
        ["images-", "memory-", "resume-", ".tmp-"]
            .iter()
            .any(|begin| name.starts_with(begin))
    };
    names
        .filter(is_left)
        .map(|name| format!("{name} on {}", host.name()))
        .collect()
}

/// Kills a process, and waits until it is dead, so that what comes next meets the fault and not its beginning.
///
/// # Panics
/// It cannot be killed, or lives on for long.
pub fn kill_for_good(pid: Pid) {
    kill(pid, Signal::SIGKILL).expect("killed");
    dies(pid).expect("dead");
}

fn dies(pid: Pid) -> Result<()> {
    eventually(LONG, || {
        if is_dead(pid) {
            Ok(())
        } else {
            Err(format!("{pid} does not die"))
        }
    })
}

/// With all its threads: what it had open is closed.
fn is_dead(pid: Pid) -> bool {
    let is = |name, value: &str| field(pid, name).is_none_or(|has| has.starts_with(value));
    is("State:", "Z") && is("Threads:", "1")
}

/// True if it stands still.
pub fn is_stopped(pid: Pid) -> bool {
    field(pid, "State:").is_some_and(|state| state.starts_with('T'))
}

fn field(pid: Pid, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .map(|value| value.trim().to_string())
}
