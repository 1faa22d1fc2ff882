//! Faults before each step of a move begins, and at its end. The moves of a round are held at their places first, each between
//! two hosts of its own; then the fault meets all of them.

pub use crate::strikes::{
    A_MOMENT, A_WHILE, Edge, Fault, Point, UNTIL_LOST, VERY_LONG, daemon_of, is_full, kill_for_good,
};

use crate::run::{Running, eventually};
use crate::strikes::{self, Halt, Party, ends, left_on, signal};
use crate::testbed::Host;
use crate::vm::{Entry, Vm};
use crate::witnesses::Witnesses;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use std::path::PathBuf;
use std::time::Duration;

/// Time for a step to be reached, for a move to end, and for a lost host to be noticed.
const LONG: Duration = Duration::from_secs(120);
/// Hosts that a round needs: the master's, and two for each move that is held.
pub const HOSTS: usize = 1 + 2 * PAIRS;
/// Pairs of source and target.
const PAIRS: usize = Step::Commit as usize;

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
    let early = [Edge::Before, Edge::After].map(|edge| {
        early(pre_copies)
            .into_iter()
            .map(|step| (step, edge))
            .collect()
    });
    early
        .into_iter()
        .chain(late().into_iter().map(|point| vec![point]))
        .collect()
}

/// Steps before the commit, that in which memory goes ahead only if it does.
fn early(pre_copies: bool) -> Vec<Step> {
    Step::ALL
        .into_iter()
        .filter(|step| *step < Step::Commit && (pre_copies || *step != Step::PreCopy))
        .collect()
}

fn late() -> Vec<Point> {
    ends(Step::ALL.into_iter().filter(|step| *step >= Step::Commit)).collect()
}

fn some(share: Share, turn: usize, pre_copies: bool) -> Vec<Vec<Point>> {
    let turned = |(i, step): (usize, Step)| (step, Edge::of(i + turn));
    let late = late();
    match share {
        Share::Half => {
            let first = early(pre_copies)
                .into_iter()
                .enumerate()
                .map(turned)
                .collect();
            let rest = late
                .chunks(2)
                .enumerate()
                .map(|(i, ends)| vec![ends[(i + turn) % 2]]);
            std::iter::once(first).chain(rest).collect()
        }
        Share::Few => {
            let first = early(pre_copies).into_iter().enumerate();
            let first = first
                .map(|(i, step)| turned((i + turn / 2, step)))
                .collect();
            let first = if turn.is_multiple_of(2) {
                Some(first)
            } else {
                None
            };
            let rest = [2 * turn, 2 * turn + 1].map(|i| vec![late[i % late.len()]]);
            first.into_iter().chain(rest).collect()
        }
    }
}

/// The places for the first fault, in rounds.
pub fn places(share: Share) -> Vec<Vec<Point>> {
    if is_full() {
        all(false)
    } else {
        some(share, 0, false)
    }
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

    fn party(self) -> Party {
        match self {
            Whom::Source | Whom::Target | Whom::Master => Party::Daemon,
            Whom::SourceTasker | Whom::TargetTasker => Party::Tasker,
            Whom::ResourceManager => Party::ResourceManager,
            Whom::TargetEngine => Party::Engine,
        }
    }
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
    halt: Halt,
    /// The daemon that stands still.
    held: Option<Pid>,
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
        let steps = vm
            .bed()
            .steps()
            .context("a testbed whose daemons stand still")?
            .to_path_buf();
        let (pre_copies, engines) = (false, std::cell::Cell::new(0));
        Ok(Rounds {
            vm,
            witnesses,
            steps,
            number: 0,
            turn: 0,
            pre_copies,
            engines,
            home,
        })
    }

    /// The places for the next fault, in rounds.
    pub fn next(&mut self, share: Share) -> Vec<Vec<Point>> {
        self.turn += 1;
        let pre_copies = self.pre_copies;
        if is_full() {
            all(pre_copies)
        } else {
            some(share, self.turn - 1, pre_copies)
        }
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
        let first = if steps.len() == 1 {
            self.number % PAIRS
        } else {
            0
        };
        ensure!(
            self.home.is_none() || steps.len() == 1,
            "one step at a time from the same host: {steps:?}"
        );
        let home = self.home;
        let pair = |i: usize| (home.unwrap_or(2 + 2 * (first + i)), 3 + 2 * (first + i));
        self.vm
            .take_in(&self.vm.bed().hosts()[..pair(steps.len() - 1).1])?;
        let named = |(i, (step, _)): (usize, &Point)| {
            (
                format!("h{}", pair(i).0),
                format!("r{}-{step}", self.number),
            )
        };
        let names: Vec<(String, String)> = steps.iter().enumerate().map(named).collect();
        let tids = self.witnesses.spawn(&names)?;
        let mut cells = Vec::new();
        for (i, (tid, (_, name))) in tids.into_iter().zip(names).enumerate() {
            let (source, target) = pair(i);
            // Whoever finds this file when the move is there stands still.
            let halt = Halt::new(&self.steps, &tid, steps[i])?;
            let (held, moving, said) = Default::default();
            cells.push(Cell {
                point: steps[i],
                name,
                tid,
                source,
                target,
                halt,
                held,
                moving,
                said,
            });
        }
        for cell in &mut cells {
            cell.moving = Some(
                self.vm
                    .start_migrate(&cell.tid, &format!("h{}", cell.target))?,
            );
        }
        cells
            .iter_mut()
            .try_for_each(|cell| self.wait_until_held(cell))?;
        Ok(cells)
    }

    fn wait_until_held(&self, cell: &mut Cell) -> Result<()> {
        let hosts = [cell.source, cell.target, 1].map(|i| self.vm.bed().host(i));
        let pid = eventually(LONG, || {
            cell.halt.who_stands(&hosts)?.ok_or_else(|| {
                let moving = cell
                    .moving
                    .as_mut()
                    .and_then(|moving| moving.poll().ok().flatten());
                format!("{} has not come to {:?}: {moving:?}", cell.tid, cell.point)
            })
        })?;
        cell.held = Some(pid);
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
        let parties: Vec<(usize, Party)> = cells
            .iter()
            .map(|(cell, whom)| (whom.host(cell), whom.party()))
            .collect();
        let pairs: Vec<(usize, usize)> = cells
            .iter()
            .map(|(cell, _)| (cell.source, cell.target))
            .collect();
        let go_on = |victims: &[Pid]| {
            let held = cells
                .iter()
                .filter_map(|(cell, _)| cell.held)
                .filter(|pid| !victims.contains(pid));
            held.into_iter()
                .try_for_each(|pid| signal(pid, Signal::SIGCONT))
        };
        let engines = strikes::strike(self.vm.bed(), &parties, &pairs, fault, go_on)?;
        self.engines.set(self.engines.get() + engines);
        Ok(())
    }

    /// Lets the daemons that hold these moves go on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn go_on(&self, cells: &[Cell]) -> Result<()> {
        cells
            .iter()
            .filter_map(|cell| cell.held)
            .try_for_each(|pid| signal(pid, Signal::SIGCONT))
    }

    /// Waits for the end of all moves of a round, and judges them: each task runs once and talks; or, if `may_be_lost` says
    /// that its only host may have been lost, it has ended, nothing of it is left, and whoever wanted to know was told. It has
    /// never run twice, no message was lost, and the event log says what happened. In the end the tasks are ended, and
    /// nothing of the moves is left on any host. How many tasks live on.
    ///
    /// # Errors
    /// The first move that ended otherwise, and how.
    pub fn judge(
        &mut self,
        cells: Vec<Cell>,
        may_be_lost: impl Fn(&Cell) -> bool,
    ) -> Result<usize> {
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
    pub fn judge_ended(
        &mut self,
        cells: Vec<Cell>,
        may_be_lost: impl Fn(&Cell) -> bool,
    ) -> Result<usize> {
        let mut alive = Vec::new();
        for cell in cells {
            let what = format!(
                "held at {:?}: {} ({}) said {}",
                cell.point, cell.name, cell.tid, cell.said
            );
            if self
                .judge_one(&cell, may_be_lost(&cell))
                .with_context(|| what)?
            {
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
            EventKind::Moved { tid, .. } | EventKind::MoveFailed { tid, .. } => {
                tid.to_string() == cell.tid
            }
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
            self.vm
                .event(LONG, "end of the task, or of its host", ended)?;
        }
        Ok(lives)
    }

    /// No host has images or tokens, or a process of a task.
    fn nothing_is_left(&self) -> Result<()> {
        eventually(LONG, || {
            let here = self.vm.hosts().map_err(|error| error.to_string())?;
            let mut left: Vec<String> = self.witnesses.processes().into_keys().collect();
            let hosts = self
                .vm
                .bed()
                .hosts()
                .iter()
                .filter(|host| here.iter().any(|name| name == host.name()));
            left.extend(hosts.flat_map(left_on));
            if left.is_empty() {
                Ok(())
            } else {
                Err(left.join(", "))
            }
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
pub fn strike(
    rounds: &mut Rounds<'_>,
    share: Share,
    whom: Whom,
    fault: Fault,
    may_be_lost: impl Fn(&Cell) -> bool,
) {
    for at in rounds.next(share) {
        strike_at(rounds, &at, whom, fault, &may_be_lost);
    }
}

/// The same at these places.
///
/// # Panics
/// See there.
pub fn strike_at(
    rounds: &mut Rounds<'_>,
    at: &[Point],
    whom: Whom,
    fault: Fault,
    may_be_lost: impl Fn(&Cell) -> bool,
) {
    let done = rounds.hold(at).and_then(|cells| {
        rounds.strike(&cells, whom, fault)?;
        rounds.judge(cells, may_be_lost)
    });
    match done {
        Ok(alive) => eprintln!("{whom:?}, {fault:?}, {at:?}: {alive} live on"),
        Err(error) => panic!(
            "{whom:?}, {fault:?}, {at:?}: {error:#}\n{}",
            rounds.vm.logs()
        ),
    }
}

/// Waits until no host has a process of a virtual machine or of one of its tasks, after the master is gone.
///
/// # Errors
/// There still is one; the sentence names it.
pub fn nobody_is_left(rounds: &Rounds<'_>) -> Result<()> {
    rounds.vm.is_gone(LONG)?;
    eventually(LONG, || {
        let left = rounds.witnesses.processes();
        if left.is_empty() {
            Ok(())
        } else {
            Err(format!("{left:?}"))
        }
    })
}

/// The process that plays this part on a host.
pub fn process_of(host: &Host, whom: Whom) -> Option<Pid> {
    strikes::processes_of(host, whom.party()).into_iter().next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn every_place(pre_copies: bool) -> BTreeSet<Point> {
        let steps = Step::ALL
            .into_iter()
            .filter(|step| pre_copies || *step != Step::PreCopy);
        ends(steps).collect()
    }

    #[test]
    fn all_rounds_have_each_place_once_and_no_more_at_a_time_than_there_are_hosts() {
        for pre_copies in [false, true] {
            let all = all(pre_copies);
            assert_eq!(all.concat().len(), every_place(pre_copies).len());
            assert_eq!(
                all.concat().into_iter().collect::<BTreeSet<_>>(),
                every_place(pre_copies)
            );
            assert!(all.iter().all(|round| round.len() <= PAIRS));
        }
    }

    #[test]
    fn two_faults_that_share_the_places_out_meet_each_of_them() {
        for (turn, pre_copies) in (0..4).flat_map(|turn| [(turn, false), (turn, true)]) {
            let places = [turn, turn + 1]
                .map(|turn| some(Share::Half, turn, pre_copies).concat())
                .concat();
            assert_eq!(
                places.into_iter().collect::<BTreeSet<_>>(),
                every_place(pre_copies),
                "from {turn} on"
            );
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
