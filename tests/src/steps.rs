//! Faults at the end of each step of a move. The moves of a round are held at their steps first, each between two hosts of its
//! own; then the fault meets all of them.

use crate::run::{Running, eventually};
use crate::testbed::Host;
use crate::vm::{Entry, Vm};
use crate::witnesses::Witnesses;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Time for a step to be reached, for a move to end, and for a lost host to be noticed.
const LONG: Duration = Duration::from_secs(120);
/// Hosts that a round needs: the master's, and two for each move that is held.
pub const HOSTS: usize = 1 + 2 * PAIRS;
/// Pairs of source and target.
const PAIRS: usize = Step::Commit as usize;

/// The steps of the protocol, in the rounds in which they are tried: those before the commit at once, the others one by one,
/// because each of these needs all daemons to know the new place, those too that are held.
pub fn rounds() -> Vec<Vec<Step>> {
    let (before, after): (Vec<Step>, Vec<Step>) = Step::ALL.into_iter().partition(|step| *step < Step::Commit);
    std::iter::once(before).chain(after.into_iter().map(|step| vec![step])).collect()
}

/// Whom a fault meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whom {
    /// The daemon of the host that the task leaves.
    Source,
    /// The daemon of the host that it moves to.
    Target,
    /// The master's daemon, while all moves are held.
    Master,
    /// The tasker of the source.
    SourceTasker,
    /// The tasker of the target.
    TargetTasker,
    /// The resource manager, while all moves are held.
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

/// One move at one step.
#[derive(Debug)]
pub struct Cell {
    /// At whose end it is held.
    pub step: Step,
    /// Name of its task.
    pub name: String,
    /// The task.
    pub tid: String,
    /// Numbers of the hosts.
    pub source: usize,
    /// See there.
    pub target: usize,
    /// The daemon that stands still.
    held: Option<(Pid, Instant)>,
    moving: Option<Running>,
    /// What the console said in the end.
    said: String,
}

/// The rounds on one virtual machine.
#[derive(Debug)]
pub struct Rounds<'a> {
    /// The virtual machine.
    pub vm: &'a Vm<'a>,
    /// Its tasks.
    pub witnesses: Witnesses,
    steps: PathBuf,
    number: usize,
    /// The host that all tasks leave, if it is always the same one.
    home: Option<usize>,
}

impl<'a> Rounds<'a> {
    /// For this virtual machine, whose testbed has an engine of its own.
    ///
    /// # Errors
    /// The director does not start.
    pub fn new(vm: &'a Vm<'a>) -> Result<Rounds<'a>> {
        Rounds::with(vm, Witnesses::start(vm)?, None)
    }

    /// The same with these tasks. `home`: the host that all of them leave; then one step at a time can be held.
    ///
    /// # Errors
    /// The testbed has no engine of its own.
    pub fn with(vm: &'a Vm<'a>, witnesses: Witnesses, home: Option<usize>) -> Result<Rounds<'a>> {
        let steps = vm.bed().steps().context("a testbed whose daemons stand still")?.to_path_buf();
        Ok(Rounds { vm, witnesses, steps, number: 0, home })
    }

    /// Takes in hosts as they are needed, spawns a task for each of these steps and moves it; each move
    /// is held at the end of its step.
    ///
    /// # Errors
    /// A step is not reached.
    pub fn hold(&mut self, steps: &[Step]) -> Result<Vec<Cell>> {
        self.number += 1;
        // A daemon does not start its tasker again and again without a pause: the next round meets the next pair.
        let first = if steps.len() == 1 { self.number % PAIRS } else { 0 };
        ensure!(self.home.is_none() || steps.len() == 1, "one step at a time from the same host: {steps:?}");
        let home = self.home;
        let pair = |i: usize| (home.unwrap_or(2 + 2 * (first + i)), 3 + 2 * (first + i));
        self.take_in(pair(steps.len() - 1).1)?;
        let named = |(i, step): (usize, &Step)| (format!("h{}", pair(i).0), format!("r{}-{step}", self.number));
        let names: Vec<(String, String)> = steps.iter().enumerate().map(named).collect();
        let tids = self.witnesses.spawn(&names)?;
        let mut cells = Vec::new();
        for (i, (tid, (_, name))) in tids.into_iter().zip(names).enumerate() {
            let (source, target) = pair(i);
            fs::write(self.steps.join(format!("{tid}-{}", steps[i])), "")?;
            cells.push(Cell {
                step: steps[i],
                name,
                tid,
                source,
                target,
                held: None,
                moving: None,
                said: String::new(),
            });
        }
        for cell in &mut cells {
            cell.moving = Some(self.vm.start_migrate(&cell.tid, &format!("h{}", cell.target))?);
        }
        cells.iter_mut().try_for_each(|cell| self.wait_until_held(cell))?;
        Ok(cells)
    }

    /// Adds those of the first hosts that are not there.
    fn take_in(&self, count: usize) -> Result<()> {
        eventually(LONG, || {
            let here = self.hosts().map_err(|error| error.to_string())?;
            let names: Vec<&str> = self.vm.bed().hosts()[..count].iter().map(Host::name).collect();
            let missing: Vec<&str> = names.into_iter().filter(|name| !here.iter().any(|host| host == name)).collect();
            if missing.is_empty() {
                return Ok(());
            }
            // A daemon that has lost its master may not have ended yet.
            self.vm.add(&missing).map_err(|error| format!("{error:#}"))
        })
    }

    /// Names of the hosts of the virtual machine.
    ///
    /// # Errors
    /// The console fails.
    pub fn hosts(&self) -> Result<Vec<String>> {
        let values = self.vm.json(&["conf"])?;
        let hosts = values.last().and_then(|value| value["hosts"].as_array()).context("conf prints hosts")?;
        Ok(hosts.iter().filter_map(|host| host["name"].as_str()).map(str::to_string).collect())
    }

    fn wait_until_held(&self, cell: &mut Cell) -> Result<()> {
        let reached = self.steps.join(format!("{}-{}", cell.tid, cell.step)).with_extension("reached");
        let pid = eventually(LONG, || {
            if !reached.exists() {
                let moving = cell.moving.as_mut().and_then(|moving| moving.poll().ok().flatten());
                return Err(format!("{} has not come to {}: {moving:?}", cell.tid, cell.step));
            }
            let hosts = [cell.source, cell.target, 1].map(|i| self.vm.bed().host(i));
            let daemons = hosts.into_iter().filter_map(daemon_of);
            daemons.into_iter().find(|pid| is_stopped(*pid)).ok_or_else(|| format!("nobody stands at {}", cell.step))
        })?;
        cell.held = Some((pid, Instant::now()));
        Ok(())
    }

    /// Lets the fault meet all moves that are held, and lets the daemons that hold them go on; waits until the fault is over.
    ///
    /// # Errors
    /// A process is not there, or the kernel refuses.
    pub fn strike(&self, cells: &[Cell], whom: Whom, fault: Fault) -> Result<()> {
        let whole: Vec<(&Cell, Whom)> = cells.iter().map(|cell| (cell, whom)).collect();
        self.strike_each(&whole, fault)
    }

    /// The same with somebody else for each move.
    ///
    /// # Errors
    /// As [`Rounds::strike`].
    pub fn strike_each(&self, cells: &[(&Cell, Whom)], fault: Fault) -> Result<()> {
        let bed = self.vm.bed();
        let host = |cell: &Cell, whom: Whom| match whom {
            Whom::Source | Whom::SourceTasker => cell.source,
            Whom::Target | Whom::TargetTasker => cell.target,
            Whom::Master | Whom::ResourceManager => 1,
        };
        let mut victims = Vec::new();
        for (cell, whom) in cells {
            match fault {
                Fault::Kill | Fault::Stop(_) => {
                    let pid = process_of(bed.host(host(cell, *whom)), *whom);
                    victims.push(pid.with_context(|| format!("no {whom:?} at {}", cell.step))?);
                }
                Fault::Cut(_) => bed.plug(host(cell, *whom), false)?,
                Fault::Part(_) => bed.part(cell.source, cell.target, true)?,
            }
        }
        // One process may be meant several times.
        victims.sort();
        victims.dedup();
        for pid in &victims {
            signal(*pid, if fault == Fault::Kill { Signal::SIGKILL } else { Signal::SIGSTOP })?;
        }
        let begun = Instant::now();
        for (pid, _) in cells.iter().filter_map(|(cell, _)| cell.held).filter(|(pid, _)| !victims.contains(pid)) {
            signal(pid, Signal::SIGCONT)?;
        }
        let (Fault::Stop(long) | Fault::Cut(long) | Fault::Part(long)) = fault else { return Ok(()) };
        eventually(long + LONG, || if begun.elapsed() >= long { Ok(()) } else { Err("not over".to_string()) })?;
        victims.into_iter().try_for_each(|pid| signal(pid, Signal::SIGCONT))?;
        for (cell, whom) in cells {
            match fault {
                Fault::Cut(_) => bed.plug(host(cell, *whom), true)?,
                Fault::Part(_) => bed.part(cell.source, cell.target, false)?,
                Fault::Kill | Fault::Stop(_) => {}
            }
        }
        Ok(())
    }

    /// Lets the daemons that hold these moves go on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn go_on(&self, cells: &[Cell]) -> Result<()> {
        cells.iter().filter_map(|cell| cell.held).try_for_each(|(pid, _)| signal(pid, Signal::SIGCONT))
    }

    /// Waits for the end of all moves of a round, and judges them: each task runs once and talks; or, if `may_be_lost` says
    /// that its only host may have been lost, it has ended, nothing of it is left, and whoever wanted to know was told. It has
    /// never run twice, no message was lost, and the event log says what happened. In the end the tasks are ended, and
    /// nothing of the moves is left on any host. How many tasks live on.
    ///
    /// # Errors
    /// The first move that ended otherwise, and how.
    pub fn judge(&mut self, cells: Vec<Cell>, may_be_lost: impl Fn(&Cell) -> bool) -> Result<usize> {
        let ended = self.end(cells)?;
        self.judge_ended(ended, may_be_lost)
    }

    /// Waits for the end of all moves of a round.
    ///
    /// # Errors
    /// One does not end.
    pub fn end(&self, mut cells: Vec<Cell>) -> Result<Vec<Cell>> {
        for cell in &mut cells {
            let said = cell.moving.take().context("it was moved")?.finish(LONG)?;
            cell.said = format!("{:?} {:?}", said.out, said.err);
        }
        Ok(cells)
    }

    /// As [`Rounds::judge`], for moves that have ended.
    ///
    /// # Errors
    /// See there.
    pub fn judge_ended(&mut self, cells: Vec<Cell>, may_be_lost: impl Fn(&Cell) -> bool) -> Result<usize> {
        let mut alive = Vec::new();
        for cell in cells {
            let what = format!("held at {}: {} ({}) said {}", cell.step, cell.name, cell.tid, cell.said);
            if self.judge_one(&cell, may_be_lost(&cell)).with_context(|| what)? {
                alive.push(cell);
            }
        }
        for cell in &alive {
            self.witnesses.stop(&cell.tid)?;
            self.witnesses.ran_once(&cell.name)?;
        }
        self.nothing_is_left()?;
        Ok(alive.len())
    }

    /// True if the task of a move lives on.
    fn judge_one(&mut self, cell: &Cell, may_be_lost: bool) -> Result<bool> {
        let (witnesses, vm) = (&mut self.witnesses, self.vm);
        let lives = eventually(LONG, || {
            let tasks = vm.tasks().map_err(|error| error.to_string())?;
            let processes = witnesses.processes().get(&cell.name).copied().unwrap_or(0);
            let gone = witnesses.has_gone(&cell.tid)?;
            let listed = tasks.iter().find(|task| task.tid == cell.tid);
            match (listed, processes, gone) {
                (Some(task), 1, false) if !task.moving => Ok(true),
                (None, 0, true) if may_be_lost => Ok(false),
                other => Err(format!("listed, processes, told of its end: {other:?}")),
            }
        })?;
        if lives {
            self.witnesses.talks(&cell.tid)?;
        }
        self.witnesses.ran_once(&cell.name)?;
        let account = self.witnesses.account(&cell.tid)?;
        ensure!(account.faults == 0, "{account:?}");
        let is_told = |entry: &Entry| match &entry.kind {
            EventKind::Moved { tid, .. } | EventKind::MoveFailed { tid, .. } => tid.to_string() == cell.tid,
            _ => false,
        };
        self.vm.event(LONG, "end of the move", is_told)?;
        let ends = [cell.source, cell.target].map(|i| self.vm.bed().host(i).name());
        let ended = |entry: &Entry| match &entry.kind {
            EventKind::TaskEnded { tid, .. } => tid.to_string() == cell.tid,
            EventKind::HostGone { name, .. } => ends.contains(&name.as_str()),
            _ => false,
        };
        if !lives {
            self.vm.event(LONG, "end of the task, or of its host", ended)?;
        }
        Ok(lives)
    }

    /// No host has images or tokens, or a process of a task.
    fn nothing_is_left(&self) -> Result<()> {
        eventually(LONG, || {
            let here = self.hosts().map_err(|error| error.to_string())?;
            let mut left: Vec<String> = self.witnesses.processes().into_keys().collect();
            for host in self.vm.bed().hosts().iter().filter(|host| here.iter().any(|name| name == host.name())) {
                let place = host.path("/tmp/sempa-0/pvm");
                for entry in fs::read_dir(place).into_iter().flatten().flatten() {
                    let name = entry.file_name().to_string_lossy().into_owned();
                    if ["images-", "memory-", "resume-", ".tmp-"].iter().any(|begin| name.starts_with(begin)) {
                        left.push(format!("{} on {}", name, host.name()));
                    }
                }
            }
            if left.is_empty() { Ok(()) } else { Err(left.join(", ")) }
        })
    }
}

/// Waits until no host has a process of a virtual machine or of one of its tasks, after the master is gone.
///
/// # Errors
/// There still is one; the sentence names it.
pub fn nobody_is_left(rounds: &Rounds<'_>) -> Result<()> {
    for host in rounds.vm.bed().hosts() {
        crate::testbed::gone(host, "pvmd", LONG)?;
        crate::testbed::gone(host, "pvm-tasker", LONG)?;
    }
    eventually(LONG, || {
        let left = rounds.witnesses.processes();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })
}

fn signal(pid: Pid, signal: Signal) -> Result<()> {
    kill(pid, signal).with_context(|| format!("{signal} to {pid}"))
}

/// The daemon of a host.
pub fn daemon_of(host: &Host) -> Option<Pid> {
    let daemon = host.processes().into_iter().find(|(_, line)| line.contains("bin/pvmd"))?;
    Some(Pid::from_raw(daemon.0.cast_signed()))
}

/// The process that plays this part on a host.
pub fn process_of(host: &Host, whom: Whom) -> Option<Pid> {
    let daemon = daemon_of(host)?;
    let named = |word: &str| {
        let found = host.processes().into_iter().filter(|(_, line)| line.contains(word));
        found.map(|(pid, _)| Pid::from_raw(pid.cast_signed())).collect::<Vec<_>>()
    };
    match whom {
        Whom::Source | Whom::Target | Whom::Master => Some(daemon),
        // It has children of the same name.
        Whom::SourceTasker | Whom::TargetTasker => {
            named("pvm-tasker").into_iter().find(|pid| field(*pid, "PPid:") == Some(daemon.to_string()))
        }
        Whom::ResourceManager => named("bin/pvm-rm").into_iter().next(),
    }
}

fn is_stopped(pid: Pid) -> bool {
    field(pid, "State:").is_some_and(|state| state.starts_with('T'))
}

fn field(pid: Pid, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_string())
}
