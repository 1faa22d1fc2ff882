//! A foreman and workers of a session in which one worker leaves and one joins at each interval.
//!
//! | command line | what the program does |
//! | --- | --- |
//! | `broker-churn workers SESSION COUNT` | runs COUNT workers; starts another one when a worker ends |
//! | `broker-churn worker SESSION` | answers each task; leaves, or kills itself, when the foreman orders so |
//! | `broker-churn foreman SESSION WORKERS DEPARTURES INTERVAL_MS` | sends tasks, orders departures, and accounts for each message |
//!
//! SESSION is a session's name, or the path of a session file. The foreman prints `all present`
//! when all workers have joined. After all departures the foreman compares its account with the
//! broker's report, prints one JSON value, and ends the session when standard input ends.

use nix::sys::signal::{SIGKILL, raise};
use sempa_broker_client::{
    EXIT_OVER, Error, GoneReason, JoinOptions, Mail, Member, MemberId, MemberState, Pattern, Role,
    SendOptions, SessionReport, Verdict, WatchTarget,
};
use serde_json::json;
use std::collections::{BTreeMap, VecDeque};
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

type Failure = Box<dyn std::error::Error>;

/// The types of messages between the foreman and its members.
const READY: i32 = 1;
const TASK: i32 = 2;
const ANSWER: i32 = 3;
const ORDER: i32 = 4;

/// Interval between two tasks.
const TASK_INTERVAL: Duration = Duration::from_millis(10);
/// Number of tasks that follow an order to depart; the worker does not receive them.
const TASKS_AFTER_ORDER: usize = 6;
/// Interval at which the launcher looks for workers that have ended.
const CHILD_CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// Time that a message waits for room or for the foreman.
const ROOM_TIMEOUT: Duration = Duration::from_secs(120);

/// How a worker departs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Departure {
    Leave,
    LeaveForOwner,
    Die,
}

impl Departure {
    const ALL: [Self; 3] = [Self::Leave, Self::LeaveForOwner, Self::Die];

    fn fits(self, reason: GoneReason) -> bool {
        match self {
            Self::Leave => reason == GoneReason::Left,
            Self::LeaveForOwner => reason == GoneReason::MovedOut,
            Self::Die => matches!(reason, GoneReason::Killed | GoneReason::Lost),
        }
    }
}

fn join(session: &str, role: Role) -> Result<Member, Error> {
    Member::join(match session.contains('/') {
        true => JoinOptions::outside(session, role),
        false => JoinOptions::new(session, role),
    })
}

fn number_in(body: &[u8]) -> Result<usize, Failure> {
    Ok(usize::try_from(u64::from_le_bytes(body.try_into()?))?)
}

fn to_body(number: usize) -> Vec<u8> {
    (number as u64).to_le_bytes().to_vec()
}

/// Works until the session is over or the foreman orders to depart.
fn work(session: &str) -> Result<(), Failure> {
    let member = join(session, Role::Worker)?;
    let options = SendOptions::default().waiting(ROOM_TIMEOUT);
    let send = |kind, body| {
        let foreman = sempa_broker_client::Destination::Foreman;
        match member.send(foreman, kind, body, options)? {
            Verdict::Taken => Ok(()),
            verdict => Err(Failure::from(format!("the foreman is {verdict}"))),
        }
    };
    send(READY, Vec::new())?;
    loop {
        let Mail::Message { kind, body, .. } = member.recv(Pattern::any())? else {
            continue;
        };
        if kind == TASK {
            send(ANSWER, body.to_vec())?;
            continue;
        }
        match Departure::ALL[number_in(&body)?] {
            Departure::Leave => return Ok(member.leave()?),
            Departure::LeaveForOwner => return Ok(member.leave_for_owner()?),
            Departure::Die => raise(SIGKILL)?,
        }
    }
}

/// Runs workers until the session is over.
fn launch(session: &str, count: usize) -> Result<(), Failure> {
    let start = || {
        let program = std::env::current_exe()?;
        Command::new(program).args(["worker", session]).spawn()
    };
    let mut children: Vec<Child> = (0..count).map(|_| start()).collect::<Result<_, _>>()?;
    while !children.is_empty() {
        let mut index = 0;
        while index < children.len() {
            let Some(status) = children[index].try_wait()? else {
                index += 1;
                continue;
            };
            if status.code() == Some(i32::from(EXIT_OVER)) {
                children.swap_remove(index).wait()?;
            } else if status.success() || status.signal() == Some(SIGKILL as i32) {
                children[index] = start()?;
            } else {
                return Err(format!("a worker failed: {status}").into());
            }
        }
        std::thread::sleep(CHILD_CHECK_INTERVAL);
    }
    Ok(())
}

/// A task and its fate.
#[derive(Clone, Copy, Debug)]
struct SentTask {
    to: MemberId,
    returns: bool,
    sent_at: Instant,
    fate: Fate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Open,
    Answered,
    Returned,
}

/// The foreman's account of one worker.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// Messages to the worker that the broker has taken, with the order.
    taken: u64,
    answered: u64,
    returned: u64,
    order: Option<Departure>,
    /// Reason and number of messages that were not received, from the notice.
    gone: Option<(GoneReason, u64)>,
}

struct Foreman {
    member: Member,
    tasks: Vec<SentTask>,
    accounts: BTreeMap<MemberId, Account>,
    /// Workers without an order, the oldest first.
    workers: VecDeque<MemberId>,
    refused: u64,
    answer_times: Vec<Duration>,
    errors: Vec<String>,
}

impl Foreman {
    fn account(&mut self, member: MemberId) -> &mut Account {
        self.accounts.entry(member).or_default()
    }

    fn send_task(&mut self, to: MemberId) -> Result<(), Failure> {
        let number = self.tasks.len();
        let returns = number.is_multiple_of(2);
        let options = SendOptions {
            returns,
            wait: Some(ROOM_TIMEOUT),
        };
        let task = SentTask {
            to,
            returns,
            sent_at: Instant::now(),
            fate: Fate::Open,
        };
        match self
            .member
            .send(to.into(), TASK, to_body(number), options)?
        {
            Verdict::Taken => {
                self.tasks.push(task);
                self.account(to).taken += 1;
            }
            Verdict::Gone(_) => self.refused += 1,
            verdict => return Err(format!("a task for {to} was answered with {verdict}").into()),
        }
        Ok(())
    }

    fn order_departure(&mut self, number: usize) -> Result<(), Failure> {
        let Some(worker) = self.workers.pop_front() else {
            return Ok(());
        };
        let which = number % Departure::ALL.len();
        let options = SendOptions::default();
        let verdict = self
            .member
            .send(worker.into(), ORDER, to_body(which), options)?;
        if verdict != Verdict::Taken {
            return Err(format!("an order for {worker} was answered with {verdict}").into());
        }
        let account = self.account(worker);
        account.taken += 1;
        account.order = Some(Departure::ALL[which]);
        for _ in 0..TASKS_AFTER_ORDER {
            self.send_task(worker)?;
        }
        Ok(())
    }

    fn handle(&mut self, mail: Mail) -> Result<(), Failure> {
        match mail {
            Mail::Message { from, kind, body } if kind == ANSWER => {
                let number = number_in(&body)?;
                self.settle(number, from, Fate::Answered);
                self.account(from).answered += 1;
                self.answer_times.push(self.tasks[number].sent_at.elapsed());
            }
            Mail::Message { from, .. } => {
                self.account(from);
                self.workers.push_back(from);
            }
            Mail::Returned { to, body, .. } => {
                self.settle(number_in(&body)?, to, Fate::Returned);
                self.account(to).returned += 1;
            }
            Mail::Gone {
                member,
                reason,
                undelivered,
            } => {
                let account = self.account(member);
                let is_ordered = account.order.is_some_and(|order| order.fits(reason));
                if account.gone.replace((reason, undelivered)).is_some() || !is_ordered {
                    self.errors.push(format!("{member} is gone: {reason}"));
                }
            }
        }
        Ok(())
    }

    fn settle(&mut self, number: usize, member: MemberId, fate: Fate) {
        let task = &mut self.tasks[number];
        if task.fate != Fate::Open || task.to != member {
            let text = format!("task {number} of {member}: {fate:?} after {:?}", task.fate);
            self.errors.push(text);
        }
        task.fate = fate;
    }

    fn take_mail(&mut self, until: Instant) -> Result<(), Failure> {
        loop {
            let time = until.saturating_duration_since(Instant::now());
            match self.member.recv_timeout(Pattern::any(), time)? {
                Some(mail) => self.handle(mail)?,
                None => return Ok(()),
            }
        }
    }

    /// True if all departures have been reported, all workers are replaced, and no worker has an
    /// unanswered task.
    fn is_settled(&self, workers: usize, departures: usize) -> bool {
        let mut gone = 0;
        let mut open = 0;
        for account in self.accounts.values() {
            gone += usize::from(account.gone.is_some());
            open += match account.gone {
                None => account.taken - account.answered,
                Some(_) => 0,
            };
        }
        gone == departures && open == 0 && self.workers.len() == workers
    }

    /// Compares the account with the broker's report.
    fn check(&mut self, report: &SessionReport) {
        let reported = report.members.iter().map(|member| (member.member, member));
        let reported: BTreeMap<_, _> = reported.collect();
        for (member, account) in &self.accounts {
            let Some(entry) = reported.get(member) else {
                self.errors
                    .push(format!("the broker has forgotten {member}"));
                continue;
            };
            let is_consistent = match (account.gone, entry.state) {
                (Some((reason, undelivered)), MemberState::Gone(reported)) => {
                    // A worker that dies may have received the order without the broker's knowing.
                    let received = account.taken - undelivered;
                    let known_orders = received.checked_sub(account.answered);
                    let has_order = match account.order {
                        Some(Departure::Die) => matches!(known_orders, Some(0 | 1)),
                        _ => known_orders == Some(1),
                    };
                    reason == reported && has_order && received == entry.received
                }
                (None, MemberState::Present) => account.taken == entry.received,
                _ => false,
            };
            if !is_consistent {
                self.errors
                    .push(format!("{member}: {account:?}, {entry:?}"));
            }
        }
        let lost = |task: &&SentTask| task.returns && task.fate == Fate::Open;
        let lost_count = self.tasks.iter().filter(lost).count();
        if lost_count > 0 {
            self.errors
                .push(format!("{lost_count} tasks did not come back"));
        }
    }

    fn summary(&mut self, report: &SessionReport) -> serde_json::Value {
        self.answer_times.sort();
        let percentile = |percent: usize| {
            let times = &self.answer_times;
            let time = times.get((times.len() * percent / 100).min(times.len().saturating_sub(1)));
            time.map_or(0.0, |time| time.as_secs_f64() * 1e3)
        };
        let undelivered =
            |account: &Account| account.gone.map_or(0, |(_, undelivered)| undelivered);
        json!({
            "workers": self.workers.len(),
            "departures": self.accounts.values().filter(|account| account.gone.is_some()).count(),
            "tasks": self.tasks.len(),
            "answered": self.accounts.values().map(|account| account.answered).sum::<u64>(),
            "returned": self.accounts.values().map(|account| account.returned).sum::<u64>(),
            "undelivered": self.accounts.values().map(undelivered).sum::<u64>(),
            "refused": self.refused,
            "answer_ms_median": percentile(50),
            "answer_ms_p99": percentile(99),
            "counts": report.counts,
            "waiting": report.waiting,
            "errors": self.errors,
        })
    }
}

fn lead(
    session: &str,
    workers: usize,
    departures: usize,
    interval: Duration,
) -> Result<(), Failure> {
    let member = join(session, Role::Foreman)?;
    member.watch(WatchTarget::All)?;
    let mut foreman = Foreman {
        member,
        tasks: Vec::new(),
        accounts: BTreeMap::new(),
        workers: VecDeque::new(),
        refused: 0,
        answer_times: Vec::new(),
        errors: Vec::new(),
    };
    while foreman.workers.len() < workers {
        let mail = foreman.member.recv(Pattern::any())?;
        foreman.handle(mail)?;
    }
    println!("all present");
    let started_at = Instant::now();
    let mut ordered = 0;
    while ordered < departures {
        if started_at.elapsed() >= interval * u32::try_from(ordered + 1)? {
            foreman.order_departure(ordered)?;
            ordered += 1;
        }
        let turn = foreman.tasks.len() % foreman.workers.len().max(1);
        if let Some(worker) = foreman.workers.get(turn).copied() {
            foreman.send_task(worker)?;
        }
        foreman.take_mail(Instant::now() + TASK_INTERVAL)?;
    }
    while !foreman.is_settled(workers, departures) {
        foreman.take_mail(Instant::now() + TASK_INTERVAL)?;
    }
    let report = foreman.member.report()?;
    foreman.check(&report);
    println!("{}", foreman.summary(&report));
    std::io::stdin().read_to_end(&mut Vec::new())?;
    foreman.member.finish(Duration::from_secs(10))?;
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<usize>().map_err(Failure::from);
    let result = match words[..] {
        ["worker", session] => work(session),
        ["workers", session, count] => number(count).and_then(|count| launch(session, count)),
        ["foreman", session, workers, departures, interval_ms] => (|| {
            let interval = Duration::from_millis(interval_ms.parse()?);
            lead(session, number(workers)?, number(departures)?, interval)
        })(),
        _ => Err("usage: broker-churn worker|workers|foreman SESSION ...".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => match error.downcast_ref::<Error>() {
            Some(Error::Over { .. }) => ExitCode::from(EXIT_OVER),
            _ => {
                eprintln!("broker-churn: {error}");
                ExitCode::FAILURE
            }
        },
    }
}
