//! The calls without pointers: numbers of `smbl.h`, the member of this process, and the newest
//! result of each thread.

use sempa_broker_client::{
    Destination, Error, GoneReason, JoinOptions, Mail, MailHead, MailKind, MailSeq, Member,
    MemberId, Pattern, Role, SendOptions, Verdict, WatchTarget,
};
use std::cell::{Cell, RefCell};
use std::ffi::CString;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

pub(crate) const SUCCESS: i32 = 0;
const GONE: i32 = 1;
const UNKNOWN: i32 = 2;
const FULL: i32 = 3;
const NO_FOREMAN: i32 = 4;
const NOT_ALLOWED: i32 = 5;
const ERR_OVER: i32 = -1;
const ERR_GONE: i32 = -2;
const ERR_REFUSED: i32 = -3;
pub(crate) const ERR_TRUNCATED: i32 = -4;
pub(crate) const ERR_ARG: i32 = -5;
const ERR_NOT_INIT: i32 = -6;
pub(crate) const ERR_TIMEOUT: i32 = -7;
const ERR_SYSTEM: i32 = -8;

const ANY: i32 = -1;
const TYPE_GONE: i32 = -2;
const TYPE_RETURNED: i32 = -3;
const FOREMAN: i32 = 0;
const FOREMAN_ROLE: i32 = 1;
/// Flag of a send: the message comes back.
const RETURN: i32 = 1;

static MEMBER: RwLock<Option<Arc<Member>>> = RwLock::new(None);

thread_local! {
    static NEWEST_TEXT: RefCell<CString> = RefCell::new(c"success".into());
    /// Pattern and result of the thread's newest probe.
    static PROBED: Cell<Option<(i32, i32, MailHead)>> = const { Cell::new(None) };
}

/// A result that is not success: its number and its text.
#[derive(Debug)]
pub(crate) struct Failure {
    code: i32,
    text: String,
}

impl Failure {
    pub(crate) fn new(code: i32, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { code, text }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Over { .. } => ERR_OVER,
            Error::Gone { .. } | Error::Superseded { .. } => ERR_GONE,
            Error::Refused { .. } => ERR_REFUSED,
            Error::TimedOut { .. } => ERR_TIMEOUT,
            Error::SessionFile(_)
            | Error::NoBroker { .. }
            | Error::Enroll(_)
            | Error::Vm(_)
            | Error::System(_) => ERR_SYSTEM,
        };
        Self::new(code, error.to_string())
    }
}

/// Keeps the text of a result for `SMBL_Error_string` and returns the result's number.
pub(crate) fn finish(result: Result<i32, Failure>) -> i32 {
    let (code, text) = match result {
        Ok(SUCCESS) => (SUCCESS, "success".to_string()),
        Ok(code) => return code,
        Err(failure) => (failure.code, failure.text),
    };
    set_text(text);
    code
}

fn set_text(text: String) {
    // A text from the broker contains no zero byte.
    NEWEST_TEXT.with_borrow_mut(|newest| *newest = CString::new(text).unwrap_or_default());
}

/// Calls `f` with the text of the thread's newest result.
pub(crate) fn with_text<R>(f: impl FnOnce(&CString) -> R) -> R {
    NEWEST_TEXT.with_borrow(|text| f(text))
}

pub(crate) fn member() -> Result<Arc<Member>, Failure> {
    let member = MEMBER.read().unwrap_or_else(PoisonError::into_inner);
    member
        .clone()
        .ok_or_else(|| Failure::new(ERR_NOT_INIT, "SMBL_Init was not called or did not succeed"))
}

pub(crate) fn init(session: Option<&str>, role: i32) -> Result<i32, Failure> {
    let role = match role {
        FOREMAN_ROLE => Role::Foreman,
        0 => Role::Worker,
        _ => return Err(Failure::new(ERR_ARG, format!("{role} is not a role"))),
    };
    let options = match session {
        Some(file) if file.contains('/') => JoinOptions::outside(file, role),
        Some(session) => JoinOptions::new(session, role),
        None => JoinOptions::from_env(role).ok_or_else(|| {
            Failure::new(
                ERR_ARG,
                "no session: pass a name, or set SEMPA_SESSION or SEMPA_SESSION_FILE",
            )
        })?,
    };
    let mut member = MEMBER.write().unwrap_or_else(PoisonError::into_inner);
    if member.is_some() {
        return Err(Failure::new(
            ERR_NOT_INIT,
            "this process is already a member; call SMBL_Finalize before another SMBL_Init",
        ));
    }
    *member = Some(Arc::new(Member::join(options)?));
    Ok(SUCCESS)
}

pub(crate) fn finalize(is_for_owner: bool) -> Result<i32, Failure> {
    let taken = MEMBER
        .write()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    let member = taken.ok_or_else(|| Failure::new(ERR_NOT_INIT, "this process is no member"))?;
    PROBED.set(None);
    // Another thread in a call keeps the member; the member leaves at the end of that call.
    if let Ok(member) = Arc::try_unwrap(member) {
        match is_for_owner {
            true => member.leave_for_owner()?,
            false => member.leave()?,
        }
    }
    Ok(SUCCESS)
}

pub(crate) fn rank() -> Result<i32, Failure> {
    Ok(number_of(member()?.id()))
}

pub(crate) fn size() -> Result<i32, Failure> {
    let report = member()?.report()?;
    let is_gone = |state| matches!(state, sempa_broker_client::MemberState::Gone(_));
    let living = report.members.iter().filter(|m| !is_gone(m.state));
    Ok(to_int(living.count()))
}

fn number_of(member: MemberId) -> i32 {
    i32::try_from(member.0).unwrap_or(i32::MAX)
}

fn to_int(value: usize) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

fn duration(seconds: f64) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| Failure::new(ERR_ARG, format!("{seconds} s is not a time")))
}

pub(crate) fn send(
    body: Vec<u8>,
    dest: i32,
    kind: i32,
    flags: i32,
    seconds: f64,
) -> Result<i32, Failure> {
    if kind < 0 {
        return Err(Failure::new(
            ERR_ARG,
            format!("{kind} is not a type; types are 0 or more"),
        ));
    }
    let to = match (dest, u32::try_from(dest)) {
        (FOREMAN, _) => Destination::Foreman,
        (_, Ok(number)) => Destination::Member(MemberId(number)),
        (_, Err(_)) => {
            let text = format!("{dest} is not a member; members are 1 or more");
            return Err(Failure::new(ERR_ARG, text));
        }
    };
    let options = SendOptions {
        returns: flags & RETURN != 0,
        wait: (seconds > 0.0).then(|| duration(seconds)).transpose()?,
    };
    Ok(to_code(member()?.send(to, kind, body, options)?))
}

fn to_code(verdict: Verdict) -> i32 {
    let code = match verdict {
        Verdict::Taken | Verdict::Done => return SUCCESS,
        Verdict::Gone(_) => GONE,
        Verdict::Unknown => UNKNOWN,
        Verdict::Full(_) => FULL,
        Verdict::NoForeman => NO_FOREMAN,
        Verdict::NotAllowed => NOT_ALLOWED,
    };
    set_text(verdict.to_string());
    code
}

/// The fields of `SMBL_Status`, without its layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MailFacts {
    pub(crate) source: i32,
    pub(crate) kind: i32,
    pub(crate) size: i32,
    pub(crate) reason: i32,
    pub(crate) undelivered: i32,
}

impl MailFacts {
    fn of_head(head: &MailHead) -> Self {
        Self {
            source: number_of(head.source),
            kind: match head.kind {
                MailKind::Message(kind) => kind,
                MailKind::Gone => TYPE_GONE,
                MailKind::Returned => TYPE_RETURNED,
            },
            size: to_int(head.byte_count),
            ..Self::default()
        }
    }

    /// Returns the facts and the bytes of mail.
    pub(crate) fn of_mail(mail: Mail) -> (Self, Vec<u8>) {
        match mail {
            Mail::Message { from, kind, body } => {
                let facts = Self {
                    source: number_of(from),
                    kind,
                    size: to_int(body.len()),
                    ..Self::default()
                };
                (facts, body.to_vec())
            }
            Mail::Gone {
                member,
                reason,
                undelivered,
            } => {
                let facts = Self {
                    source: number_of(member),
                    kind: TYPE_GONE,
                    reason: reason_number(reason),
                    undelivered: i32::try_from(undelivered).unwrap_or(i32::MAX),
                    ..Self::default()
                };
                (facts, Vec::new())
            }
            Mail::Returned {
                to, body, reason, ..
            } => {
                let facts = Self {
                    source: number_of(to),
                    kind: TYPE_RETURNED,
                    size: to_int(body.len()),
                    reason: reason_number(reason),
                    ..Self::default()
                };
                (facts, body.to_vec())
            }
        }
    }
}

fn reason_number(reason: GoneReason) -> i32 {
    match reason {
        GoneReason::Left => 1,
        GoneReason::Lost => 2,
        GoneReason::Killed => 3,
        GoneReason::TimedOut => 4,
        GoneReason::MovedOut => 5,
        GoneReason::SessionOver => 6,
        GoneReason::Forgotten => 7,
    }
}

fn pattern(source: i32, kind: i32) -> Result<Pattern, Failure> {
    let mut pattern = Pattern::any();
    if source != ANY {
        let number = u32::try_from(source)
            .map_err(|_| Failure::new(ERR_ARG, format!("{source} is not a member")))?;
        pattern = pattern.source(MemberId(number));
    }
    match kind {
        ANY => {}
        TYPE_GONE => pattern = pattern.mail_kind(MailKind::Gone),
        TYPE_RETURNED => pattern = pattern.mail_kind(MailKind::Returned),
        kind if kind < 0 => return Err(Failure::new(ERR_ARG, format!("{kind} is not a type"))),
        kind => pattern = pattern.kind(kind),
    }
    Ok(pattern)
}

/// Waits for mail and returns its facts; `None` if the time passes first.
fn wait_for_head(
    member: &Member,
    pattern: Pattern,
    timeout: Option<Duration>,
) -> Result<Option<MailHead>, Failure> {
    match timeout {
        None => Ok(Some(member.probe(pattern)?)),
        Some(timeout) => Ok(member.probe_timeout(pattern, timeout)?),
    }
}

pub(crate) fn probe(source: i32, kind: i32) -> Result<MailFacts, Failure> {
    let head = member()?.probe(pattern(source, kind)?)?;
    PROBED.set(Some((source, kind, head)));
    Ok(MailFacts::of_head(&head))
}

pub(crate) fn iprobe(source: i32, kind: i32) -> Result<Option<MailFacts>, Failure> {
    let head = member()?.iprobe(pattern(source, kind)?)?;
    if let Some(head) = head {
        PROBED.set(Some((source, kind, head)));
    }
    Ok(head.as_ref().map(MailFacts::of_head))
}

/// Returns the mail that the thread's newest probe has found, if the pattern is that of the probe
/// or names the mail.
fn probed_head(source: i32, kind: i32) -> Option<MailHead> {
    let (probed_source, probed_kind, head) = PROBED.get()?;
    let facts = MailFacts::of_head(&head);
    let is_same = (source, kind) == (probed_source, probed_kind);
    let is_named = (source, kind) == (facts.source, facts.kind);
    (is_same || is_named).then_some(head)
}

/// Receives mail of at most `capacity` bytes. Mail that is larger stays; its facts are returned.
pub(crate) fn receive(
    source: i32,
    kind: i32,
    capacity: usize,
    timeout_seconds: Option<f64>,
) -> Result<(MailFacts, Option<Vec<u8>>), Failure> {
    let member = member()?;
    let pattern = pattern(source, kind)?;
    let timeout = timeout_seconds.map(duration).transpose()?;
    let mut head = probed_head(source, kind);
    loop {
        let found = match head.take() {
            Some(head) => Some(head),
            None => wait_for_head(&member, pattern, timeout)?,
        };
        let Some(found) = found else {
            return Err(Failure::new(ERR_TIMEOUT, "no such message came in time"));
        };
        if found.byte_count > capacity {
            return Ok((MailFacts::of_head(&found), None));
        }
        let mail = receive_at(&member, found.seq)?;
        // Another thread may have received the mail that was found.
        if let Some(mail) = mail {
            PROBED.set(None);
            let (facts, bytes) = MailFacts::of_mail(mail);
            return Ok((facts, Some(bytes)));
        }
    }
}

fn receive_at(member: &Member, seq: MailSeq) -> Result<Option<Mail>, Failure> {
    Ok(member.recv_probed(seq)?)
}

pub(crate) fn watch(watched: i32) -> Result<i32, Failure> {
    let target = match (watched, u32::try_from(watched)) {
        (ANY, _) => WatchTarget::All,
        (_, Ok(number)) => WatchTarget::Member(MemberId(number)),
        (_, Err(_)) => return Err(Failure::new(ERR_ARG, format!("{watched} is not a member"))),
    };
    Ok(to_code(member()?.watch(target)?))
}

pub(crate) fn is_over() -> Result<bool, Failure> {
    Ok(member()?.over().is_some())
}

pub(crate) fn finish_session(seconds: f64) -> Result<i32, Failure> {
    let within = duration(seconds)?;
    Ok(to_code(member()?.finish(within)?))
}
