"""A local server that answers as huggingface.co does, for the real huggingface_hub: see its file_download.py,
utils/_http.py and hf_api.py for what it expects."""
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = '0123456789abcdef' * 2 + '01234567'
TOKEN = 'hf_accepted'  # opens gated repositories
API = re.compile(r'/api/models/([^/]+/[^/]+)/(revision|tree)/.+')
FILE = re.compile(r'/(api/resolve-cache/models/)?([^/]+/[^/]+)(?:/resolve)?/(?:main|[0-9a-f]{40})/([^/]+)')
STORAGE = re.compile(r'/storage/(.+)')


@contextlib.contextmanager
def hub(root, gated=()):
    """Serves root/<owner>/<name>/<file>. gated: repositories. Yields the server."""
    server = ThreadingHTTPServer(('127.0.0.1', 0), Answer)
    vars(server).update(root=Path(root), gated=gated)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Answer(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args):
        """Prints nothing."""

    def answer(self, status, body=b'', **headers):
        self.send_response(status)
        for name, value in {'Content_Length': len(body), **headers}.items():
            self.send_header(name.replace('_', '-'), str(value))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(body)

    def do_GET(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        token = self.headers.get('Authorization', '').removeprefix('Bearer ')
        if match := STORAGE.fullmatch(path):
            return self.answer(400) if token else self.send(hub.root / match[1])
        match = API.fullmatch(path) or FILE.fullmatch(path)
        if not match:
            return self.answer(404)
        repo = match[1] if match.re is API else match[2]
        if not (hub.root / repo).is_dir():  # without a token, the hub may not say that it is missing
            return self.answer(404 if token else 401, X_Error_Code='RepoNotFound')
        if match.re is API:
            found = [self.entry(one) for one in sorted((hub.root / repo).iterdir())]
            info = {'id': repo, 'sha': COMMIT, 'siblings': [{'rfilename': one['path']} for one in found]}
            return self.answer(200, json.dumps(found if match[2] == 'tree' else info).encode())
        if repo in hub.gated and token != TOKEN:
            return self.answer(403 if token else 401, X_Error_Code='GatedRepo')
        file = hub.root / repo / match[3]
        if not file.is_file():
            return self.answer(404, X_Error_Code='EntryNotFound')
        entry = self.entry(file)
        facts = {'X_Repo_Commit': COMMIT, 'ETag': f'"{entry["oid"]}"'}
        if lfs := entry.get('lfs'):  # stored on another host, which no token may reach
            return self.answer(302, X_Linked_Size=lfs['size'], X_Linked_ETag=f'"{lfs["oid"]}"', **facts,
                               Location=f'http://localhost:{hub.server_port}/storage/{repo}/{file.name}')
        if not match[1]:
            return self.answer(307, **facts, Location=f'/api/resolve-cache/models/{repo}/main/{file.name}')
        return self.send(file, **facts)

    do_HEAD = do_GET

    def entry(self, path):
        """A file as the tree lists it. Weights are in Git LFS."""
        body = path.read_bytes()
        one = {'type': 'file', 'path': path.name, 'size': len(body), 'oid': hashlib.sha1(body).hexdigest()}
        lfs = {'oid': hashlib.sha256(body).hexdigest(), 'size': len(body), 'pointerSize': 134}
        return {**one, 'lfs': lfs} if path.suffix == '.safetensors' else one

    def send(self, path, **facts):
        body = path.read_bytes()
        return self.answer(200, body, **facts)
