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
/// A deadline further away is a slip of the pen.
const WITHIN_MAX: Duration = Duration::from_secs(24 * 3600);

/// What `drain` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Drain {
    /// The host's name.
    pub(crate) host: String,
    /// It is to be empty within this time.
    pub(crate) within: Option<Duration>,
    /// Jobs with tasks that nobody takes are checkpointed and ended when half of that time is over, so that it is enough for
    /// them, and in the end all that are still there.
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
            EventKind::Moved { tid, bytes, resident, .. } => {
                self.steps.remove(tid);
                self.bytes.insert(*tid, *bytes.max(resident));
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
}

impl<M: Machine> Emptying<'_, M> {
    /// Waits until the host is empty, or for as long as it may take.
    fn wait(&mut self) -> Result<(), Error> {
        let Drain { host, within, checkpoint } = self.what;
        let all = self.tasks.len();
        let mut until = self.begun + within.unwrap_or(PATIENCE);
        let write_at = within.filter(|_| *checkpoint).map(|within| self.begun + within / 2);
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
            if write_at.is_some_and(|at| at <= Instant::now()) {
                // Who is on his way, or waits for his turn, may still get there.
                self.write(|why| why.is_some())?;
            }
        }
        Ok(())
    }

    /// Has jobs checkpointed and ended that have such tasks there.
    fn write(&mut self, which: impl Fn(&Option<String>) -> bool) -> Result<(), Error> {
        let those: Left = self.tasks.iter().filter(|(_, why)| which(why)).map(|(t, why)| (*t, why.clone())).collect();
        if those.is_empty() {
            return Ok(());
        }
        for job in jobs(self.machine, &those)? {
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
        for job in jobs(self.machine, &self.tasks)? {
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
    let (gone, sets, failed, heard) = Default::default();
    let mut emptying = Emptying { machine, what, show, begun: Instant::now(), tasks, gone, sets, failed, heard };
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

/// The jobs of these tasks, that with the most of them first: one checkpoint brings them all away.
fn jobs(machine: &impl Machine, tasks: &Left) -> Result<Vec<Tid>, Error> {
    let all: BTreeMap<Tid, Tid> = machine.tasks(Tid::NONE)?.into_iter().map(|task| (task.tid, task.parent)).collect();
    let spawned = |tid: &Tid| tasks.contains_key(tid) || all.get(tid).is_some_and(|parent| parent.is_task());
    let mut jobs = BTreeMap::<Tid, usize>::new();
    for tid in tasks.keys() {
        *jobs.entry(top(*tid, &all, spawned)).or_default() += 1;
    }
    // Whoever was started by hand and is alive would see its children end. It cannot be written itself.
    jobs.retain(|job, _| all.get(job).is_none_or(|by| *by == machine.tid() || !all.contains_key(by)));
    let mut jobs: Vec<(Tid, usize)> = jobs.into_iter().collect();
    jobs.sort_by_key(|(job, many)| (Reverse(*many), *job));
    Ok(jobs.into_iter().map(|(job, _)| job).collect())
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
