//! The hub client against a server of our own.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use drivetrain_core::{Error, model::ModelResolver};
use drivetrain_data::Hub;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Speaks just enough of the hub's protocol: file lists, redirects of weights, ranges.
struct Server {
    endpoint: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Model id to its files.
    models: BTreeMap<&'static str, BTreeMap<&'static str, Vec<u8>>>,
    /// Needed for `owner/gated`.
    token: &'static str,
    /// Breaks the next transfer of weights off in the middle.
    break_off: AtomicBool,
    requests: Mutex<Vec<String>>,
}

impl Server {
    fn start() -> Self {
        let weights: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
        let small = || -> BTreeMap<&'static str, Vec<u8>> {
            [
                ("config.json", b"{}".to_vec()),
                ("tokenizer.json", b"{\"t\": 1}".to_vec()),
                ("README.md", b"# no".to_vec()),
                ("pytorch_model.bin", vec![1; 10]),
                ("onnx/model.onnx", vec![1; 10]),
            ]
            .into()
        };
        let mut single = small();
        single.insert("model.safetensors", weights.clone());
        let mut sharded = small();
        let index = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}"#;
        sharded.insert("model.safetensors.index.json", index.into());
        sharded.insert("model-1.safetensors", weights[..50].to_vec());
        sharded.insert("model-2.safetensors", weights[..60].to_vec());
        let mut hostile = small();
        let index = r#"{"weight_map": {"a": "../../../escape.safetensors"}}"#;
        hostile.insert("model.safetensors.index.json", index.into());
        let models = [
            ("owner/single", single.clone()),
            ("owner/sharded", sharded),
            ("owner/gated", single),
            ("owner/bin-only", small()),
            ("owner/hostile", hostile),
        ];
        let state = Arc::new(State {
            models: models.into(),
            token: "secret-token",
            ..State::default()
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                thread::spawn(move || state.answer(stream));
            }
        });
        Self { endpoint, state }
    }

    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.state.requests.lock().unwrap())
    }
}

impl State {
    fn answer(&self, stream: TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut first = String::new();
        reader.read_line(&mut first).unwrap();
        let path = first.split(' ').nth(1)?.to_owned();
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim().split_once(':') else {
                break;
            };
            headers.insert(name.to_lowercase(), value.trim().to_owned());
        }
        let range = headers.get("range").cloned().unwrap_or_default();
        self.requests
            .lock()
            .unwrap()
            .push(format!("{path} {range}").trim().to_owned());
        let mut stream = stream;
        let mut send = |status: &str, headers: &str, body: &[u8], length: usize| {
            let head = format!(
                "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
            );
            let _ = stream
                .write_all(head.as_bytes())
                .and_then(|()| stream.write_all(body));
        };
        let is_weights = path.starts_with("/cdn/");
        let rest = path
            .trim_start_matches("/cdn/")
            .trim_start_matches("/api/models/");
        let rest = rest.trim_start_matches('/');
        let Some((id, files)) = self.models.iter().find(|(id, _)| rest.starts_with(*id)) else {
            send("404 Not Found", "", b"", 0);
            return None;
        };
        let allowed = headers
            .get("authorization")
            .is_some_and(|a| a.ends_with(self.token));
        if *id == "owner/gated" && !is_weights && !allowed {
            send("401 Unauthorized", "", b"", 0);
            return None;
        }
        if path.starts_with("/api/") {
            if !path.ends_with("/revision/main") {
                send("404 Not Found", "", b"", 0);
                return None;
            }
            let names: Vec<_> = files
                .keys()
                .map(|n| format!("{{\"rfilename\": \"{n}\"}}"))
                .collect();
            let body = format!(
                "{{\"sha\": \"{COMMIT}\", \"siblings\": [{}]}}",
                names.join(",")
            );
            send(
                "200 OK",
                "Content-Type: application/json\r\n",
                body.as_bytes(),
                body.len(),
            );
            return None;
        }
        let name = rest.rsplit('/').next()?;
        assert!(
            is_weights || path.contains(COMMIT),
            "every file is of the same commit: {path}"
        );
        let bytes = files.get(name)?;
        let tag = format!(
            "x-repo-commit: {COMMIT}\r\nETag: \"{}-{name}\"\r\n",
            id.replace('/', "-")
        );
        if name.ends_with(".safetensors") && !is_weights {
            let location = format!("Location: /cdn/{id}/{name}\r\n");
            // Absolute, as the hub's own redirects to its store are.
            let location = location.replace("/cdn", &format!("http://{}/cdn", headers["host"]));
            let etag = format!("x-linked-etag: \"{}-{name}\"\r\n", id.replace('/', "-"));
            send("302 Found", &format!("{tag}{etag}{location}"), b"", 0);
            return None;
        }
        let (from, to) = range
            .strip_prefix("bytes=")
            .and_then(|r| r.split_once('-'))?;
        let from: usize = from.parse().unwrap();
        let to = to
            .parse()
            .map_or(bytes.len(), |to: usize| (to + 1).min(bytes.len()));
        let part = &bytes[from..to];
        let about = format!(
            "{tag}Content-Range: bytes {from}-{}/{}\r\n",
            to.max(1) - 1,
            bytes.len()
        );
        let broken =
            is_weights && part.len() > 1000 && self.break_off.swap(false, Ordering::SeqCst);
        let sent = if broken {
            &part[..part.len() / 3]
        } else {
            part
        };
        send("206 Partial Content", &about, sent, part.len());
        Some(())
    }
}

struct Desk {
    home: tempfile::TempDir,
    server: Server,
}

impl Desk {
    fn new() -> Self {
        Self {
            home: tempfile::tempdir().unwrap(),
            server: Server::start(),
        }
    }

    fn hub(&self, more: &[(&str, &str)]) -> Hub {
        let home = self.home.path().to_str().unwrap();
        let given: BTreeMap<_, _> = [("HF_HOME", home), ("HF_ENDPOINT", &*self.server.endpoint)]
            .into_iter()
            .chain(more.iter().copied())
            .collect();
        Hub::from_variables(|name| given.get(name).map(|v| (*v).to_owned())).with_progress(false)
    }

    fn resolve(&self, id: &str) -> Result<PathBuf, Error> {
        self.hub(&[]).resolve(id)
    }
}

#[test]
fn a_model_is_downloaded_once_and_then_found_offline() {
    let desk = Desk::new();
    let folder = desk.resolve("owner/single").unwrap();
    assert!(folder.ends_with(COMMIT) && folder.starts_with(desk.home.path().join("hub")));
    let weights = std::fs::read(folder.join("model.safetensors")).unwrap();
    assert_eq!(weights.len(), 100_000);
    assert!((0..100_000u32).all(|i| weights[i as usize] == i as u8));
    let mut names: Vec<_> = folder
        .read_dir()
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(
        names,
        ["config.json", "model.safetensors", "tokenizer.json"]
    );
    assert!(!desk.server.requests().is_empty());
    for hub in [
        desk.hub(&[]),
        desk.hub(&[]).cached_only(),
        desk.hub(&[("HF_HUB_OFFLINE", "1")]),
        desk.hub(&[("HF_ENDPOINT", "http://127.0.0.1:1")]),
    ] {
        assert_eq!(hub.resolve("owner/single").unwrap(), folder);
    }
    assert_eq!(hub_by_commit(&desk), folder);
    assert_eq!(desk.server.requests(), Vec::<String>::new());
}

fn hub_by_commit(desk: &Desk) -> PathBuf {
    desk.hub(&[])
        .cached_only()
        .resolve(&format!("owner/single@{COMMIT}"))
        .unwrap()
}

#[test]
fn shards_are_those_of_the_index() {
    let desk = Desk::new();
    let folder = desk.resolve("owner/sharded").unwrap();
    assert_eq!(
        std::fs::read(folder.join("model-2.safetensors"))
            .unwrap()
            .len(),
        60
    );
    // A snapshot that lacks a shard is not a model.
    std::fs::remove_file(folder.join("model-1.safetensors")).unwrap();
    assert!(
        desk.hub(&[])
            .cached_only()
            .resolve("owner/sharded")
            .is_err()
    );
    assert_eq!(desk.resolve("owner/sharded").unwrap(), folder);
    assert!(folder.join("model-1.safetensors").is_file());
}

#[test]
fn a_download_that_breaks_off_continues() {
    let desk = Desk::new();
    desk.server.state.break_off.store(true, Ordering::SeqCst);
    let folder = desk.resolve("owner/single").unwrap();
    let weights = std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(weights.len() == 100_000 && weights[70_000] == 70_000u32 as u8);
    let ranges = desk.server.requests();
    let resumed =
        |r: &String| r.starts_with("/cdn/") && !r.ends_with("=0-0") && !r.ends_with("=0-");
    assert!(ranges.iter().any(resumed), "{ranges:?}");
}

#[test]
fn gated_models_need_a_token_which_no_message_shows() {
    let desk = Desk::new();
    let without = desk.resolve("owner/gated").unwrap_err();
    assert_eq!(without.context("status"), Some("401"));
    assert!(
        without.remedy().unwrap().contains("set HF_TOKEN"),
        "{without}"
    );
    let wrong = desk.hub(&[("HF_TOKEN", "wrong-token")]);
    let error = wrong.resolve("owner/gated").unwrap_err();
    assert!(error.message().contains("refuses the token"), "{error}");
    assert!(!format!("{error} {wrong:?}").contains("wrong-token"));
    let right = desk.hub(&[("HF_TOKEN", "secret-token")]);
    assert!(right.resolve("owner/gated").is_ok());
}

#[test]
fn a_token_that_a_login_left_is_used() {
    let desk = Desk::new();
    std::fs::write(desk.home.path().join("token"), "secret-token\n").unwrap();
    assert!(desk.resolve("owner/gated").is_ok());
}

#[test]
fn failures_name_model_and_endpoint_and_say_what_to_do() {
    let desk = Desk::new();
    let missing = desk.resolve("owner/absent").unwrap_err();
    assert_eq!(missing.context("status"), Some("404"));
    assert_eq!(missing.context("model"), Some("owner/absent"));
    assert_eq!(missing.context("endpoint"), Some(&*desk.server.endpoint));
    assert!(desk.resolve("owner/single@no-branch").is_err());
    let bin = desk.resolve("owner/bin-only").unwrap_err();
    assert!(bin.message().contains("no safetensors"), "{bin}");
    let hostile = desk.resolve("owner/hostile").unwrap_err();
    assert!(hostile.message().contains("index"), "{hostile}");
    let away = desk
        .hub(&[("HF_ENDPOINT", "http://127.0.0.1:1")])
        .resolve("owner/single")
        .unwrap_err();
    assert!(away.message().contains("cannot be reached"), "{away}");
    assert!(away.remedy().unwrap().contains("HF_ENDPOINT"), "{away}");
    let offline = desk
        .hub(&[("HF_HUB_OFFLINE", "1")])
        .resolve("owner/single")
        .unwrap_err();
    assert_eq!(offline.context("offline"), Some("HF_HUB_OFFLINE is set"));
    assert_eq!(offline.kind().exit_code(), 3);
}

#[test]
fn folders_come_first_and_what_is_no_id_is_refused() {
    let desk = Desk::new();
    let folder = desk.home.path().join("mine");
    std::fs::create_dir(&folder).unwrap();
    assert_eq!(desk.resolve(folder.to_str().unwrap()).unwrap(), folder);
    for id in [
        "", "a/b/c", "../x", "/nowhere", "a b", "owner/", "x@", "x@../y", "x@a..b",
    ] {
        let error = desk.resolve(id).unwrap_err();
        assert_eq!(error.kind().exit_code(), 2, "{id}: {error}");
    }
    assert_eq!(desk.server.requests(), Vec::<String>::new());
}
