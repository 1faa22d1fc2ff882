//! Faults before each step of a move begins, and at its end. The moves of a round are held at their places first, each between
//! two hosts of its own; then the fault meets all of them.

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

/// Nobody is lost of a fault that lasts so long: what comes before it and after it takes seconds on a loaded machine, and all of
/// it is well below the usual silence after which a host is lost.
pub const A_MOMENT: Duration = Duration::from_secs(1);
/// The same for longer.
pub const A_WHILE: Duration = Duration::from_secs(5);
/// Longer than the usual silence after which a host is lost.
pub const UNTIL_LOST: Duration = Duration::from_secs(14);
/// Much longer.
pub const VERY_LONG: Duration = Duration::from_secs(30);
/// Time for a step to be reached, for a move to end, and for a lost host to be noticed.
const LONG: Duration = Duration::from_secs(120);
/// Hosts that a round needs: the master's, and two for each move that is held.
pub const HOSTS: usize = 1 + 2 * PAIRS;
/// Pairs of source and target.
const PAIRS: usize = Step::Commit as usize;

/// Has everything tried that there is: each fault on each party at each place. Otherwise they share the places out.
const FULL: &str = "SEMPA_TEST_FULL";

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

    fn of(number: usize) -> Edge {
        if number.is_multiple_of(2) { Edge::Before } else { Edge::After }
    }
}

/// A place in a move.
pub type Point = (Step, Edge);

/// How many of the places each fault meets each party at, unless all are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Each step, at one of its ends: the next fault has the other one.
    Half,
    /// Two from the commit on, and with every second fault each step before it.
    Few,
}

/// The places in the rounds in which they are tried: those before the commit at once, the others one by one, because each of
/// these needs all daemons to know the new place, those too that are held.
fn all(pre_copies: bool) -> Vec<Vec<Point>> {
    let early =
        [Edge::Before, Edge::After].map(|edge| early(pre_copies).into_iter().map(|step| (step, edge)).collect());
    early.into_iter().chain(late().into_iter().map(|point| vec![point])).collect()
}

/// Steps before the commit, that in which memory goes ahead only if it does.
fn early(pre_copies: bool) -> Vec<Step> {
    Step::ALL.into_iter().filter(|step| *step < Step::Commit && (pre_copies || *step != Step::PreCopy)).collect()
}

fn late() -> Vec<Point> {
    let late = Step::ALL.into_iter().filter(|step| *step >= Step::Commit);
    late.flat_map(|step| [(step, Edge::Before), (step, Edge::After)]).collect()
}

fn some(share: Share, turn: usize, pre_copies: bool) -> Vec<Vec<Point>> {
    let turned = |(i, step): (usize, Step)| (step, Edge::of(i + turn));
    let late = late();
    match share {
        Share::Half => {
            let first = early(pre_copies).into_iter().enumerate().map(turned).collect();
            let rest = late.chunks(2).enumerate().map(|(i, ends)| vec![ends[(i + turn) % 2]]);
            std::iter::once(first).chain(rest).collect()
        }
        Share::Few => {
            let first = early(pre_copies).into_iter().enumerate();
            let first = first.map(|(i, step)| turned((i + turn / 2, step))).collect();
            let first = if turn.is_multiple_of(2) { Some(first) } else { None };
            let rest = [2 * turn, 2 * turn + 1].map(|i| vec![late[i % late.len()]]);
            first.into_iter().chain(rest).collect()
        }
    }
}

/// The places for the first fault, in rounds.
pub fn places(share: Share) -> Vec<Vec<Point>> {
    if is_full() { all(false) } else { some(share, 0, false) }
}

/// Everything is to be tried.
pub fn is_full() -> bool {
    std::env::var_os(FULL).is_some_and(|value| !value.is_empty())
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
    /// What the tasker of the target has started of CRIU, if anything works for the move at that place. At the source nothing does:
    /// CRIU runs there within a step only.
    TargetEngine,
}

impl Whom {
    /// The number of its host.
    fn host(self, cell: &Cell) -> usize {
        match self {
            Whom::Source | Whom::SourceTasker => cell.source,
            Whom::Target | Whom::TargetTasker | Whom::TargetEngine => cell.target,
            Whom::Master | Whom::ResourceManager => 1,
        }
    }

    fn is_engine(self) -> bool {
        matches!(self, Whom::TargetEngine)
    }
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

/// One move at one place.
#[derive(Debug)]
pub struct Cell {
    /// Where it is held.
    pub point: Point,
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
    turn: usize,
    /// Memory goes ahead of these tasks.
    pub pre_copies: bool,
    /// Engines that were met so far.
    engines: std::cell::Cell<usize>,
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
        let (pre_copies, engines) = (false, std::cell::Cell::new(0));
        Ok(Rounds { vm, witnesses, steps, number: 0, turn: 0, pre_copies, engines, home })
    }

    /// The places for the next fault, in rounds.
    pub fn next(&mut self, share: Share) -> Vec<Vec<Point>> {
        self.turn += 1;
        let pre_copies = self.pre_copies;
        if is_full() { all(pre_copies) } else { some(share, self.turn - 1, pre_copies) }
    }

    /// Engines that were met so far.
    pub fn engines(&self) -> usize {
        self.engines.get()
    }

    /// Takes in hosts as they are needed, spawns a task for each of these places and moves it; each move
    /// is held at its place.
    ///
    /// # Errors
    /// A step is not reached.
    pub fn hold(&mut self, steps: &[Point]) -> Result<Vec<Cell>> {
        self.number += 1;
        // A daemon does not start its tasker again and again without a pause: the next round meets the next pair.
        let first = if steps.len() == 1 { self.number % PAIRS } else { 0 };
        ensure!(self.home.is_none() || steps.len() == 1, "one step at a time from the same host: {steps:?}");
        let home = self.home;
        let pair = |i: usize| (home.unwrap_or(2 + 2 * (first + i)), 3 + 2 * (first + i));
        self.take_in(pair(steps.len() - 1).1)?;
        let named = |(i, (step, _)): (usize, &Point)| (format!("h{}", pair(i).0), format!("r{}-{step}", self.number));
        let names: Vec<(String, String)> = steps.iter().enumerate().map(named).collect();
        let tids = self.witnesses.spawn(&names)?;
        let mut cells = Vec::new();
        for (i, (tid, (_, name))) in tids.into_iter().zip(names).enumerate() {
            let (source, target) = pair(i);
            let cell =
                Cell { point: steps[i], name, tid, source, target, held: None, moving: None, said: String::new() };
            fs::write(self.file_of(&cell), "")?;
            cells.push(cell);
        }
        for cell in &mut cells {
            cell.moving = Some(self.vm.start_migrate(&cell.tid, &format!("h{}", cell.target))?);
        }
        cells.iter_mut().try_for_each(|cell| self.wait_until_held(cell))?;
        Ok(cells)
    }

    /// Whoever finds this file when the move is there stands still.
    fn file_of(&self, cell: &Cell) -> PathBuf {
        let (step, edge) = cell.point;
        self.steps.join(format!("{}-{}{step}", cell.tid, edge.word()))
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
        let reached = self.file_of(cell).with_extension("reached");
        let pid = eventually(LONG, || {
            if !reached.exists() {
                let moving = cell.moving.as_mut().and_then(|moving| moving.poll().ok().flatten());
                return Err(format!("{} has not come to {:?}: {moving:?}", cell.tid, cell.point));
            }
            let hosts = [cell.source, cell.target, 1].map(|i| self.vm.bed().host(i));
            let daemons = hosts.into_iter().filter_map(daemon_of);
            daemons.into_iter().find(|pid| is_stopped(*pid)).ok_or_else(|| format!("nobody stands at {:?}", cell.point))
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
        let mut victims = Vec::new();
        for (cell, whom) in cells {
            match fault {
                Fault::Kill | Fault::Stop(_) => {
                    let found = processes_of(bed.host(whom.host(cell)), *whom);
                    ensure!(!found.is_empty() || whom.is_engine(), "no {whom:?} at {:?}", cell.point);
                    self.engines.set(self.engines.get() + if whom.is_engine() { found.len() } else { 0 });
                    victims.extend(found);
                }
                Fault::Cut(_) => bed.plug(whom.host(cell), false)?,
                Fault::Part(_) => bed.part(cell.source, cell.target, true)?,
            }
        }
        // One process may be meant several times.
        victims.sort();
        victims.dedup();
        let met = if fault == Fault::Kill { Signal::SIGKILL } else { Signal::SIGSTOP };
        let ends_by_itself = cells.iter().all(|(_, whom)| whom.is_engine());
        victims
            .iter()
            .try_for_each(|pid| signal(*pid, met).or_else(|e| if ends_by_itself { Ok(()) } else { Err(e) }))?;
        let begun = Instant::now();
        // On a loaded machine who is killed may take a while to die: whoever goes on before could leave the step behind until then.
        if fault == Fault::Kill {
            victims.iter().copied().try_for_each(dies)?;
        }
        for (pid, _) in cells.iter().filter_map(|(cell, _)| cell.held).filter(|(pid, _)| !victims.contains(pid)) {
            signal(pid, Signal::SIGCONT)?;
        }
        let (Fault::Stop(long) | Fault::Cut(long) | Fault::Part(long)) = fault else { return Ok(()) };
        eventually(long + LONG, || if begun.elapsed() >= long { Ok(()) } else { Err("not over".to_string()) })?;
        let go_on = |pid| signal(pid, Signal::SIGCONT).or_else(|e| if ends_by_itself { Ok(()) } else { Err(e) });
        victims.into_iter().try_for_each(go_on)?;
        for (cell, whom) in cells {
            match fault {
                Fault::Cut(_) => bed.plug(whom.host(cell), true)?,
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
            let what = format!("held at {:?}: {} ({}) said {}", cell.point, cell.name, cell.tid, cell.said);
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

/// May a fault at this place cost the task? While only the source has it. The master may hear that the source is lost before it
/// hears that the target has the whole task.
pub fn only_source_has_it(cell: &Cell) -> bool {
    cell.point < (Step::Restore, Edge::After)
}

/// Up to the commit. A tasker's death is heard at once, also before the commit that is just due.
pub fn not_committed(cell: &Cell) -> bool {
    cell.point < (Step::Commit, Edge::After)
}

/// While only the target has it: from the order to give the source's copy up on, there is no way back.
pub fn only_target_has_it(cell: &Cell) -> bool {
    !not_committed(cell)
}

/// Nowhere.
pub fn never(_: &Cell) -> bool {
    false
}

/// One fault on one party at those places whose turn it is.
///
/// # Panics
/// A move ends otherwise than it may; with all that the virtual machine has written.
pub fn strike(rounds: &mut Rounds<'_>, share: Share, whom: Whom, fault: Fault, may_be_lost: impl Fn(&Cell) -> bool) {
    for at in rounds.next(share) {
        strike_at(rounds, &at, whom, fault, &may_be_lost);
    }
}

/// The same at these places.
///
/// # Panics
/// See there.
pub fn strike_at(rounds: &mut Rounds<'_>, at: &[Point], whom: Whom, fault: Fault, may_be_lost: impl Fn(&Cell) -> bool) {
    let done = rounds.hold(at).and_then(|cells| {
        rounds.strike(&cells, whom, fault)?;
        rounds.judge(cells, may_be_lost)
    });
    match done {
        Ok(alive) => eprintln!("{whom:?}, {fault:?}, {at:?}: {alive} live on"),
        Err(error) => panic!("{whom:?}, {fault:?}, {at:?}: {error:#}\n{}", rounds.vm.logs()),
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

/// The processes that play this part on a host: one, but for engines.
pub fn processes_of(host: &Host, whom: Whom) -> Vec<Pid> {
    let Some(daemon) = daemon_of(host) else { return Vec::new() };
    let named = |word: &str| {
        let found = host.processes().into_iter().filter(|(_, line)| line.contains(word));
        found.map(|(pid, _)| Pid::from_raw(pid.cast_signed())).collect::<Vec<_>>()
    };
    match whom {
        Whom::Source | Whom::Target | Whom::Master => vec![daemon],
        // It has children of the same name.
        Whom::SourceTasker | Whom::TargetTasker => {
            let is_child = |pid: &Pid| field(*pid, "PPid:") == Some(daemon.to_string());
            named("pvm-tasker").into_iter().find(is_child).into_iter().collect()
        }
        Whom::ResourceManager => named("bin/pvm-rm").into_iter().take(1).collect(),
        Whom::TargetEngine => {
            // By the program that it runs: it is started by a link that has another name.
            let program = |pid: &Pid| fs::read_link(format!("/proc/{pid}/exe")).ok();
            let is_engine = |pid: &Pid| program(pid).is_some_and(|path| path.ends_with("criu"));
            let all = host.processes().into_iter().map(|(pid, _)| Pid::from_raw(pid.cast_signed()));
            all.filter(is_engine).collect()
        }
    }
}

/// The process that plays this part on a host.
pub fn process_of(host: &Host, whom: Whom) -> Option<Pid> {
    processes_of(host, whom).into_iter().next()
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
    eventually(LONG, || if is_dead(pid) { Ok(()) } else { Err(format!("{pid} does not die")) })
}

/// With all its threads: what it had open is closed.
fn is_dead(pid: Pid) -> bool {
    let is = |name, value: &str| field(pid, name).is_none_or(|has| has.starts_with(value));
    is("State:", "Z") && is("Threads:", "1")
}

fn is_stopped(pid: Pid) -> bool {
    field(pid, "State:").is_some_and(|state| state.starts_with('T'))
}

fn field(pid: Pid, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn every_place(pre_copies: bool) -> BTreeSet<Point> {
        let steps = Step::ALL.into_iter().filter(|step| pre_copies || *step != Step::PreCopy);
        steps.flat_map(|step| [(step, Edge::Before), (step, Edge::After)]).collect()
    }

    #[test]
    fn all_rounds_have_each_place_once_and_no_more_at_a_time_than_there_are_hosts() {
        for pre_copies in [false, true] {
            let all = all(pre_copies);
            assert_eq!(all.concat().len(), every_place(pre_copies).len());
            assert_eq!(all.concat().into_iter().collect::<BTreeSet<_>>(), every_place(pre_copies));
            assert!(all.iter().all(|round| round.len() <= PAIRS));
        }
    }

    #[test]
    fn two_faults_that_share_the_places_out_meet_each_of_them() {
        for (turn, pre_copies) in (0..4).flat_map(|turn| [(turn, false), (turn, true)]) {
            let places = [turn, turn + 1].map(|turn| some(Share::Half, turn, pre_copies).concat()).concat();
            assert_eq!(places.into_iter().collect::<BTreeSet<_>>(), every_place(pre_copies), "from {turn} on");
        }
    }

    #[test]
    fn a_few_places_for_each_fault_are_all_of_them_after_some_faults() {
        for pre_copies in [false, true] {
            let places = (0..4).flat_map(|turn| some(Share::Few, turn, pre_copies).concat());
            assert_eq!(places.collect::<BTreeSet<_>>(), every_place(pre_copies));
        }
    }
}
