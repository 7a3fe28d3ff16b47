//! c10d's TCPStore: keys and values that all ranks see.

use std::{
    fmt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cxx::UniquePtr;
use drivetrain_core::{Error, ErrorKind, Result};

use crate::shim::ffi;

/// How often a key is asked for that is not there yet.
const POLL: Duration = Duration::from_millis(5);

/// A connection to a store, whose keys here all begin with a prefix.
#[derive(Clone)]
pub struct Store {
    inner: Arc<UniquePtr<ffi::Store>>,
    prefix: String,
    address: String,
}

impl Store {
    /// A store that this process keeps for as long as it holds it, on a port of this machine; 0 is any that is free.
    ///
    /// # Errors
    /// `Device` if the port is taken.
    pub fn serve(port: u16, timeout: Duration) -> Result<Self> {
        Self::open("127.0.0.1", port, true, timeout)
    }

    /// A store that is kept elsewhere; or here, where `serve`.
    pub(crate) fn open(host: &str, port: u16, serve: bool, timeout: Duration) -> Result<Self> {
        let opened = ffi::tcp_store(host, port, serve, milliseconds(timeout));
        let inner =
            opened.map_err(|cause| cannot_open(host, port, serve, timeout, cause.what()))?;
        Ok(Self {
            address: format!("{host}:{}", inner.port()),
            inner: Arc::new(inner),
            prefix: String::new(),
        })
    }

    /// The same store, with keys apart from others'.
    #[must_use]
    pub fn under(&self, prefix: &str) -> Self {
        Self {
            prefix: format!("{}{prefix}/", self.prefix),
            ..self.clone()
        }
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.inner.port()
    }

    pub(crate) fn inner(&self) -> &ffi::Store {
        &self.inner
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Sets a key.
    pub(crate) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.asked(self.inner.set(&self.key(key), value))
    }

    /// A key's value; `None` where it is not set.
    pub(crate) fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let key = self.key(key);
        match self.asked(self.inner.has(&key))? {
            true => self.asked(self.inner.get(&key)).map(Some),
            false => Ok(None),
        }
    }

    /// Adds to a number, which is 0 at first.
    pub(crate) fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.asked(self.inner.add(&self.key(key), amount))
    }

    /// The keys' values, waited for until the deadline; then those that are not set.
    pub(crate) fn get_all(
        &self,
        keys: &[String],
        deadline: Instant,
    ) -> Result<std::result::Result<Vec<Vec<u8>>, Vec<usize>>> {
        let mut found: Vec<Option<Vec<u8>>> = vec![None; keys.len()];
        loop {
            for (key, value) in keys.iter().zip(&mut found) {
                if value.is_none() {
                    *value = self.get(key)?;
                }
            }
            let missing: Vec<usize> = (0..keys.len()).filter(|&i| found[i].is_none()).collect();
            if missing.is_empty() {
                return Ok(Ok(found.into_iter().flatten().collect()));
            }
            if Instant::now() >= deadline {
                return Ok(Err(missing));
            }
            thread::sleep(POLL);
        }
    }

    fn asked<T>(&self, answer: std::result::Result<T, cxx::Exception>) -> Result<T> {
        answer.map_err(|cause| {
            let message = "the store at which ranks meet does not answer";
            Error::new(ErrorKind::RankLost, "ask_store", message)
                .with("store", &self.address)
                .caused_by(first_line(cause.what()))
        })
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("address", &self.address)
            .field("prefix", &self.prefix)
            .finish()
    }
}

fn cannot_open(host: &str, port: u16, serve: bool, timeout: Duration, cause: &str) -> Error {
    let taken = serve && cause.contains("EADDRINUSE");
    let (kind, message, remedy) = match (serve, taken) {
        (true, true) => (
            ErrorKind::Device,
            "the port at which ranks would meet is taken".to_owned(),
            "choose another (MASTER_PORT or --port), or 0 for any that is free",
        ),
        (true, false) => (
            ErrorKind::Device,
            "the store at which ranks would meet cannot be opened".to_owned(),
            "rank 0 keeps it: MASTER_ADDR must name the machine of rank 0",
        ),
        (false, _) => (
            ErrorKind::Timeout,
            format!(
                "rank 0's store was not found within {} s",
                timeout.as_secs_f64()
            ),
            "look for rank 0's first error; MASTER_ADDR and MASTER_PORT must be the same on every rank",
        ),
    };
    Error::new(kind, "meet", message)
        .with("store", format!("{host}:{port}"))
        .help(remedy)
        .caused_by(first_line(cause))
}

pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost"
        || host
            .parse()
            .is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
}

pub(crate) fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX).max(1)
}

/// c10d appends advice of its own.
pub(crate) fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let advice = line.find(" This is typically caused").unwrap_or(line.len());
    line[..advice].to_owned()
}
