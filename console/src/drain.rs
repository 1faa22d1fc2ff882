//! `drain` and `undrain`: a host is emptied, for repairs or before it leaves, and takes tasks again. The resource manager has its
//! tasks leave; what is shown here is what it says when it is asked again and again.

use crate::machine::{Machine, misfit};
use crate::parse::ParseError;
use crate::session::Outcome;
use crate::words::{option, span};
use libpvm::Error;
use sempa_proto::checkpoint::{CutFailure, SetEntry, SetReport};
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_proto::rm::{Answer, Question};
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, Tid};
use serde_json::json;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Pause between two questions how far it is.
const PAUSE: Duration = Duration::from_millis(100);
/// Who names no deadline waits as long as tasks leave, and so long for the first and for each further one.
const PATIENCE: Duration = Duration::from_secs(10);
/// Events in one question.
const EVENTS_AT_ONCE_MAX: u32 = 4096;
/// What a job that is written is taken to need beside its bytes, in seconds.
const JOB_SECONDS: f64 = 2.0;
/// Bytes per second of memory that get into the store, if tasks do not move more slowly: to a disk, sealed and flushed.
const WRITE_RATE: f64 = 50e6;
/// More than is reckoned, because disks are shared; and the least time that is taken for it.
const WRITE_MARGIN: f64 = 1.5;
const WRITE_MIN: Duration = Duration::from_secs(5);
/// It is reckoned anew when it is so old: all hosts are asked for it.
const RECKONED_FOR: Duration = Duration::from_secs(1);
/// Tasks whose memory is asked for.
const ASKED_MAX: usize = 256;
/// Moves of fewer bytes say nothing of the way.
const TELLING_BYTES: u64 = 16 << 20;
/// A deadline further away is a slip of the pen.
const WITHIN_MAX: Duration = Duration::from_secs(24 * 3600);

/// What `drain` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Drain {
    /// The host's name.
    pub(crate) host: String,
    /// It is to be empty within this time.
    pub(crate) within: Option<Duration>,
    /// Jobs with tasks that nobody takes are checkpointed and ended when the time is just enough for that, and in the end all
    /// that are still there.
    pub(crate) checkpoint: bool,
}

/// Reads the words behind the command.
pub(crate) fn parse(args: &[String]) -> Result<Drain, ParseError> {
    let (mut host, mut within, mut checkpoint) = (None, None, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match option("drain", "--deadline", arg, &mut rest)? {
            Some(value) => {
                let wanted = "a time such as 30s or 5m";
                let not = || ParseError::NotA { command: "drain", word: value.into(), wanted };
                within = Some(span(value).filter(|span| *span <= WITHIN_MAX).ok_or_else(not)?);
            }
            None if arg == "--checkpoint" => checkpoint = true,
            None if arg.starts_with('-') => {
                return Err(ParseError::UnknownFlag(arg.trim_start_matches('-').to_string()));
            }
            None if host.is_none() => host = Some(arg.clone()),
            None => return Err(ParseError::WrongArgs("drain")),
        }
    }
    Ok(Drain { host: host.ok_or(ParseError::WrongArgs("drain"))?, within, checkpoint })
}

fn not_known(command: &str, host: &str) -> Outcome {
    Outcome::complaint(format!("{command}: the resource manager knows no host {host}; 'conf' lists them"))
}

/// What is left on a host, and why.
type Left = BTreeMap<Tid, Option<String>>;

fn left(answer: Answer) -> Result<Option<(bool, Left, u32)>, Error> {
    match answer {
        Answer::Drain { drained, tasks, stay } => Ok(Some((drained, tasks.into_iter().collect(), stay))),
        Answer::Unknown => Ok(None),
        _ => Err(misfit()),
    }
}

/// What the event log tells of the moves of tasks.
#[derive(Debug, Default)]
struct Heard {
    /// The first event that has not been read.
    from: u64,
    /// The step of its move that has ended last.
    steps: BTreeMap<Tid, Step>,
    /// Bytes of its newest image.
    bytes: BTreeMap<Tid, u64>,
    /// Bytes of all that have moved, and how long each was on its way.
    moved: (u64, Micros),
}

impl Heard {
    fn listen(&mut self, machine: &impl Machine) -> Result<(), Error> {
        loop {
            let events = machine.events(self.from, EVENTS_AT_ONCE_MAX)?;
            let Some(last) = events.last() else { return Ok(()) };
            self.from = last.number + 1;
            events.iter().for_each(|event| self.hear(&event.kind));
        }
    }

    fn hear(&mut self, kind: &EventKind) {
        match kind {
            EventKind::Moving { tid, step, .. } => drop(self.steps.insert(*tid, *step)),
            EventKind::Moved { tid, bytes, resident, whole, .. } => {
                self.steps.remove(tid);
                let bytes = *bytes.max(resident);
                self.bytes.insert(*tid, bytes);
                if bytes >= TELLING_BYTES {
                    self.moved = (self.moved.0.saturating_add(bytes), self.moved.1 + *whole);
                }
            }
            EventKind::MoveFailed { tid, .. } => drop(self.steps.remove(tid)),
            _ => {}
        }
    }

    /// Where a task is that nothing keeps.
    fn way(&self, tid: Tid) -> String {
        match self.steps.get(&tid) {
            None => "it is on its way".into(),
            // The coordinator lets few go at a time.
            Some(Step::Inspect) => "it waits for its turn; the smallest go first".into(),
            Some(step) => format!("it is on its way, {step} done"),
        }
    }

    /// What the way of a task that has left cost.
    fn cost(&self, tid: Tid) -> String {
        self.bytes.get(&tid).map(|bytes| format!(", {:.1} MB", *bytes as f64 / 1e6)).unwrap_or_default()
    }
}

/// A host that is being emptied.
struct Emptying<'a, M> {
    machine: &'a M,
    what: &'a Drain,
    show: &'a mut dyn FnMut(&str),
    begun: Instant,
    tasks: Left,
    gone: Vec<Tid>,
    sets: Vec<String>,
    /// Jobs of which there was no checkpoint.
    failed: BTreeSet<Tid>,
    heard: Heard,
    writing: Writing,
}

impl<M: Machine> Emptying<'_, M> {
    /// Waits until the host is empty, or for as long as it may take.
    fn wait(&mut self) -> Result<(), Error> {
        let Drain { host, within, checkpoint } = self.what;
        let all = self.tasks.len();
        let mut until = self.begun + within.unwrap_or(PATIENCE);
        while !self.tasks.is_empty() && Instant::now() < until {
            std::thread::sleep(PAUSE);
            let question = Question::Draining { host: host.clone() };
            let Some((drained, mut now, _)) = left(self.machine.ask_rm(&question)?)? else { break };
            // The end of one that was written may not have come to its ears.
            now.retain(|tid, _| !self.gone.contains(tid));
            self.heard.listen(self.machine)?;
            for tid in self.tasks.keys().filter(|tid| !now.contains_key(tid)) {
                self.gone.push(*tid);
                (self.show)(&format!("{tid} has left ({} of {all}{})\n", self.gone.len(), self.heard.cost(*tid)));
                until = if within.is_none() { Instant::now() + PATIENCE } else { until };
            }
            self.tasks = now;
            if !drained {
                (self.show)(&format!("{host} takes tasks again: somebody has called it off\n"));
                break;
            }
            // Who is on his way, or waits for his turn, may still get there.
            if *checkpoint
                && within.is_some()
                && self.is_time_to_write(until.saturating_duration_since(Instant::now()))?
            {
                self.write(Option::is_some)?;
            }
        }
        Ok(())
    }

    /// The tasks that are still there for such a reason.
    fn those(&self, which: impl Fn(&Option<String>) -> bool) -> Left {
        self.tasks.iter().filter(|(_, why)| which(why)).map(|(tid, why)| (*tid, why.clone())).collect()
    }

    /// True if no more than what is left until the deadline is needed to write the jobs of tasks that nobody takes.
    fn is_time_to_write(&mut self, left: Duration) -> Result<bool, Error> {
        let stuck = self.those(Option::is_some);
        if stuck.is_empty() {
            return Ok(false);
        }
        if let Some((_, time)) = self.writing.reckoned.filter(|(at, _)| at.elapsed() < RECKONED_FOR) {
            return Ok(left <= time);
        }
        let all = parents(self.machine)?;
        let jobs: Vec<Tid> =
            jobs(self.machine.tid(), &all, &stuck).into_iter().filter(|job| !self.failed.contains(job)).collect();
        let members = all.keys().filter(|tid| jobs.contains(&job_of(**tid, &all, &stuck)));
        let bytes = self.writing.bytes(members.copied().collect(), |tid| {
            self.machine.can_migrate(tid, None).map_or(0, |survey| survey.resident_bytes)
        });
        let time = time_to_write(jobs.len(), bytes, self.heard.moved);
        self.writing.reckoned = Some((Instant::now(), time));
        Ok(left <= time)
    }

    /// Has jobs checkpointed and ended that have such tasks there.
    fn write(&mut self, which: impl Fn(&Option<String>) -> bool) -> Result<(), Error> {
        let those = self.those(which);
        if those.is_empty() {
            return Ok(());
        }
        for job in jobs(self.machine.tid(), &parents(self.machine)?, &those) {
            if self.failed.contains(&job) {
                continue;
            }
            match write_down(self.machine, job)? {
                Ok(report) => {
                    (self.show)(&format!("job {job} has ended; 'restart {}' starts it again\n", report.set));
                    self.tasks.retain(|tid, _| !report.tasks.contains(tid));
                    self.gone.extend(report.tasks);
                    self.sets.push(report.set);
                }
                Err(why) => {
                    self.failed.insert(job);
                    (self.show)(&format!("no checkpoint of job {job}: {why}; it goes on\n"));
                }
            }
        }
        Ok(())
    }

    /// What would be lost with the host now, if that was not prevented.
    fn warn(&mut self) -> Result<(), Error> {
        if self.tasks.is_empty() || self.what.checkpoint {
            return Ok(());
        }
        // A store that cannot be read has none that could be counted on.
        let sets = match self.machine.ask(Request::Sets)? {
            Reply::Sets(sets) => sets.unwrap_or_default(),
            _ => return Err(misfit()),
        };
        for job in jobs(self.machine.tid(), &parents(self.machine)?, &self.tasks) {
            (self.show)(&at_risk(&self.what.host, job, &sets));
        }
        Ok(())
    }

    /// What is left in the end.
    fn told(self, stay: u32) -> Outcome {
        let (host, tasks) = (&self.what.host, &self.tasks);
        let mut text = String::new();
        for (tid, why) in tasks {
            let why = why.clone().unwrap_or_else(|| self.heard.way(*tid));
            text.push_str(&format!("{tid} is still there: {why}\n"));
        }
        if tasks.is_empty() {
            text.push_str(&format!("{host} is empty after {:.1} s\n", self.begun.elapsed().as_secs_f64()));
        }
        if stay > 0 {
            text.push_str(&format!(
                "{stay} that belong to the host, or were started there by hand, stay until they end\n"
            ));
        }
        let names = |list: &mut dyn Iterator<Item = &Tid>| list.map(Tid::to_string).collect::<Vec<_>>();
        let still: Vec<_> = tasks.iter().map(|(tid, why)| json!({ "tid": tid.to_string(), "why": why })).collect();
        let gone = names(&mut self.gone.iter());
        let value = json!({ "host": host, "left": gone, "still": still, "stay": stay, "sets": self.sets });
        (self.show)(&text);
        Outcome::done(String::new(), value, !tasks.is_empty())
    }
}

/// Has a host emptied and waits, until it is or its time is over; `show` gets each line as it comes.
pub(crate) fn drain<M: Machine>(machine: &M, what: &Drain, show: &mut dyn FnMut(&str)) -> Result<Outcome, Error> {
    let Drain { host, within, checkpoint } = what;
    let micros = within.map(|within| Micros(within.as_micros() as u64));
    let Some((_, tasks, stay)) = left(machine.ask_rm(&Question::Drain { host: host.clone(), within: micros })?)? else {
        return Ok(not_known("drain", host));
    };
    let all = tasks.len();
    show(&format!("{host} takes no tasks; {all} {} to leave\n", if all == 1 { "is" } else { "are" }));
    let (gone, sets, failed, heard, writing) = Default::default();
    let mut emptying =
        Emptying { machine, what, show, begun: Instant::now(), tasks, gone, sets, failed, heard, writing };
    emptying.wait()?;
    if *checkpoint {
        // Once more: what was in the way may have passed.
        emptying.failed.clear();
        emptying.write(|_| true)?;
    }
    emptying.warn()?;
    Ok(emptying.told(stay))
}

/// What a job loses if a host leaves that it has tasks on.
fn at_risk(host: &str, job: Tid, sets: &[SetEntry]) -> String {
    let newest = sets.iter().filter(|set| set.job == job && set.broken.is_none()).max_by_key(|set| set.made);
    let lost = newest.map_or("all that it has done".into(), |set| format!("what it has done since {}", set.set));
    format!("job {job} loses {lost} if {host} leaves now; 'drain {host} --checkpoint' writes it\n")
}

/// What is to be written.
#[derive(Debug, Default)]
struct Writing {
    /// What tasks have of memory, as far as it was asked for.
    memory: BTreeMap<Tid, u64>,
    /// How long it may take, and when that was reckoned.
    reckoned: Option<(Instant, Duration)>,
}

impl Writing {
    /// Bytes of these tasks; `ask` is put for each once, and for no more than [`ASKED_MAX`]: the others are taken for ordinary.
    fn bytes(&mut self, tasks: Vec<Tid>, ask: impl Fn(Tid) -> u64) -> u64 {
        for tid in tasks.iter().take(ASKED_MAX) {
            self.memory.entry(*tid).or_insert_with(|| ask(*tid));
        }
        let known: Vec<u64> = tasks.iter().filter_map(|tid| self.memory.get(tid).copied()).collect();
        let sum = known.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        let mean = sum / known.len().max(1) as u64;
        sum.saturating_add(mean.saturating_mul((tasks.len() - known.len()) as u64))
    }
}

/// How long it may take to write so many jobs of so many bytes, where tasks of so many moved in that time.
fn time_to_write(jobs: usize, bytes: u64, moved: (u64, Micros)) -> Duration {
    let measured = moved.0 as f64 / (moved.1.0 as f64 / 1e6);
    let rate = if moved.1.0 > 0 { measured.clamp(1.0, WRITE_RATE) } else { WRITE_RATE };
    let seconds = JOB_SECONDS * jobs as f64 + bytes as f64 / rate;
    // A year is more than any deadline.
    let time = Duration::from_secs_f64((seconds * WRITE_MARGIN).min(3e7));
    time.max(WRITE_MIN)
}

/// Who has spawned each task.
fn parents(machine: &impl Machine) -> Result<BTreeMap<Tid, Tid>, Error> {
    Ok(machine.tasks(Tid::NONE)?.into_iter().map(|task| (task.tid, task.parent)).collect())
}

/// The job of a task: these tasks were all spawned, whatever became of who did it.
fn job_of(tid: Tid, parents: &BTreeMap<Tid, Tid>, tasks: &Left) -> Tid {
    let spawned = |tid: &Tid| tasks.contains_key(tid) || parents.get(tid).is_some_and(|parent| parent.is_task());
    top(tid, parents, spawned)
}

/// The jobs of these tasks, that with the most of them first: one checkpoint brings them all away. `me`: the console.
fn jobs(me: Tid, parents: &BTreeMap<Tid, Tid>, tasks: &Left) -> Vec<Tid> {
    let mut jobs = BTreeMap::<Tid, usize>::new();
    for tid in tasks.keys() {
        *jobs.entry(job_of(*tid, parents, tasks)).or_default() += 1;
    }
    // Whoever was started by hand and is alive would see its children end. It cannot be written itself.
    jobs.retain(|job, _| parents.get(job).is_none_or(|by| *by == me || !parents.contains_key(by)));
    let mut jobs: Vec<(Tid, usize)> = jobs.into_iter().collect();
    jobs.sort_by_key(|(job, many)| (Reverse(*many), *job));
    jobs.into_iter().map(|(job, _)| job).collect()
}

/// Has a job checkpointed and ended.
fn write_down(machine: &impl Machine, job: Tid) -> Result<Result<SetReport, CutFailure>, Error> {
    match machine.ask(Request::Checkpoint { job, pace: None, end: true, wait: true })? {
        Reply::Checkpointed(result) => Ok(result),
        _ => Err(misfit()),
    }
}

/// The first task of the job that a task belongs to: the topmost of its ancestors that somebody has spawned.
fn top(tid: Tid, parents: &BTreeMap<Tid, Tid>, spawned: impl Fn(&Tid) -> bool) -> Tid {
    let mut top = tid;
    // No longer than there are tasks, whatever a daemon says.
    for _ in 0..parents.len() {
        match parents.get(&top).filter(|parent| parents.contains_key(parent) && spawned(parent)) {
            Some(parent) => top = *parent,
            None => break,
        }
    }
    top
}

/// Lets a host take tasks again.
pub(crate) fn undrain(machine: &impl Machine, host: &str) -> Result<Outcome, Error> {
    let Some((drained, ..)) = left(machine.ask_rm(&Question::Undrain { host: host.to_string() })?)? else {
        return Ok(not_known("undrain", host));
    };
    Ok(Outcome::done(format!("{host} takes tasks\n"), json!({ "host": host, "drained": drained }), false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::migration::Cause;
    use sempa_proto::{HostId, MigrationId};

    fn words(line: &str) -> Result<Drain, ParseError> {
        parse(&line.split(' ').filter(|word| !word.is_empty()).map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn a_host_and_a_deadline_are_read_in_any_order() {
        let seconds = |n| Some(Duration::from_secs(n));
        assert_eq!(words("h2"), Ok(Drain { host: "h2".into(), within: None, checkpoint: false }));
        assert_eq!(words("h2 --deadline 30s"), Ok(Drain { host: "h2".into(), within: seconds(30), checkpoint: false }));
        assert_eq!(words("--deadline=5m h2"), Ok(Drain { host: "h2".into(), within: seconds(300), checkpoint: false }));
        assert!(words("h2 --checkpoint --deadline 30s").is_ok_and(|drain| drain.checkpoint));
        for line in ["", "h2 h3", "--deadline 3s", "h2 --deadline"] {
            assert_eq!(words(line), Err(ParseError::WrongArgs("drain")), "{line}");
        }
        assert_eq!(words("-x h2"), Err(ParseError::UnknownFlag("x".into())));
        for time in ["0s", "x", "3", "2d"] {
            let error = words(&format!("h2 --deadline {time}")).expect_err(time).to_string();
            assert_eq!(error, format!("drain: {time} is not a time such as 30s or 5m"));
        }
    }

    #[test]
    fn jobs_are_written_when_the_time_is_just_enough_for_their_memory_at_the_rate_at_which_tasks_move() {
        let seconds = |jobs, bytes, moved| time_to_write(jobs, bytes, moved).as_secs();
        assert_eq!(seconds(1, 1 << 20, (0, Micros(0))), 5, "never later than that");
        assert_eq!(seconds(2, 1_000_000_000, (0, Micros(0))), 36);
        assert_eq!(
            seconds(2, 1_000_000_000, (900_000_000, Micros::from_secs(1))),
            36,
            "a disk is not as fast as a network"
        );
        assert_eq!(seconds(2, 1_000_000_000, (30_000_000, Micros::from_secs(3))), 156, "tasks leave slowly");
        assert!(seconds(1, u64::MAX, (1, Micros::from_secs(9))) > WITHIN_MAX.as_secs());
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        let (mut writing, asked) = (Writing::default(), std::cell::Cell::new(0));
        let ask = |_| {
            asked.set(asked.get() + 1);
            10
        };
        assert_eq!(writing.bytes((1..=3).map(tid).collect(), ask), 30);
        assert_eq!((writing.bytes((1..=4).map(tid).collect(), ask), asked.get()), (40, 4), "each is asked for once");
        let many = 2 * ASKED_MAX as i32;
        assert_eq!(writing.bytes((1..=many).map(tid).collect(), ask), 10 * many as u64);
        assert!(asked.get() <= ASKED_MAX + 4);
        assert_eq!(Writing::default().bytes(Vec::new(), ask), 0);
    }

    #[test]
    fn what_is_told_of_a_task_on_its_way_follows_from_the_log() {
        let (tid, host) = (Tid::from_raw(0x40001), HostId::MASTER);
        let moving = |step| EventKind::Moving { id: MigrationId(1), tid, from: host, to: host, step, bytes: 0 };
        let mut heard = Heard::default();
        assert_eq!((heard.way(tid).as_str(), heard.cost(tid).as_str()), ("it is on its way", ""));
        heard.hear(&moving(Step::Inspect));
        assert_eq!(heard.way(tid), "it waits for its turn; the smallest go first");
        heard.hear(&moving(Step::Dump));
        assert_eq!(heard.way(tid), format!("it is on its way, {} done", Step::Dump));
        let (cause, frozen) = (Cause::Drain { by: tid }, Micros(1));
        heard.hear(&EventKind::Moved {
            id: MigrationId(1),
            tid,
            from: host,
            to: host,
            cause,
            bytes: 200_000,
            resident: 12_340_000,
            frozen,
            whole: frozen,
        });
        assert_eq!((heard.way(tid).as_str(), heard.cost(tid).as_str()), ("it is on its way", ", 12.3 MB"));
    }

    #[test]
    fn what_a_job_would_lose_is_what_it_has_done_since_its_newest_set_that_is_whole() {
        let (job, other) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
        let entry = |set: &str, job, made, broken: Option<&str>| SetEntry {
            set: set.into(),
            job,
            made: Micros(made),
            tasks: 1,
            bytes: 1,
            broken: broken.map(String::from),
            ended: None,
        };
        let sets = [entry("a", job, 1, None), entry("b", job, 2, None), entry("c", job, 3, Some("cut short"))];
        assert_eq!(
            at_risk("h2", job, &sets),
            "job t40001 loses what it has done since b if h2 leaves now; 'drain h2 --checkpoint' writes it\n"
        );
        assert!(at_risk("h2", other, &sets).starts_with("job t40002 loses all that it has done if h2 leaves now;"));
    }

    #[test]
    fn the_job_of_a_task_begins_at_the_topmost_ancestor_that_somebody_has_spawned() {
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        // A console, what it has spawned, and a grandchild; a task whose parent has ended; two that a liar made parents of each other.
        let parents = BTreeMap::from([
            (tid(1), Tid::NONE),
            (tid(2), tid(1)),
            (tid(3), tid(2)),
            (tid(4), tid(9)),
            (tid(5), tid(6)),
            (tid(6), tid(5)),
        ]);
        let job = |of: i32| top(tid(of), &parents, |tid| parents.get(tid).is_some_and(|parent| parent.is_task()));
        assert_eq!([job(3), job(2), job(4)], [tid(2), tid(2), tid(4)]);
        assert!([tid(5), tid(6)].contains(&job(5)));
    }
}
